"""The public import path for Lightning: the callback, and the entry point `lightning.pytorch.callbacks_factory`."""

from chronicle.resume.adapters.lightning import ChronicleCallback, callbacks_factory

__all__ = ["ChronicleCallback", "callbacks_factory"]

"""The public import path of the HF Trainer's callback: `from chronicle.resume.transformers import ChronicleCallback`."""

from chronicle.resume.adapters.transformers import ChronicleCallback

__all__ = ["ChronicleCallback"]

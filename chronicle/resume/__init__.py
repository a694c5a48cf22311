"""The guard: no resumed run takes its first optimizer step in a state that is not the one the journal promises.

At save a fingerprint of memory goes into the checkpoint's manifest; at load, and again right before the first step, memory
is compared with it or with the contract of a rollback; a mismatch refuses on every rank. `guard` wraps an Accelerator
or a DeepSpeed engine, `attach` a plain torch loop; HF Trainer and Lightning have callbacks. Importing this package
imports no torch.
"""

from importlib import import_module
from typing import Any

__all__ = ["ResumeRefused", "attach", "guard"]

_LAZY = {
    "guard": "chronicle.resume.entrance",
    "attach": "chronicle.resume.adapters.torch",
    "ResumeRefused": "chronicle.resume.checks.check",
}


def __getattr__(name: str) -> Any:
    """Load on first use: `chronicle.guard` must not cost `import chronicle` anything."""
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'chronicle.resume' has no attribute {name!r}")

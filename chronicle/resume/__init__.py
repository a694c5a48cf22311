"""The guard: stops a resumed run before its first optimizer step if its state differs from what the journal expects.

At a save a description of memory goes into the checkpoint's manifest. At a load, and again right before the first step, memory
is compared with it or with the contract of a rollback (`first_step.py` lists what); a mismatch refuses on every rank.
`guard` wraps an Accelerator or a DeepSpeed engine, `attach` a plain torch loop; HF Trainer and Lightning have callbacks.
Importing this package imports no torch.
"""

import sys
from importlib import import_module
from typing import Any

__all__ = ["ResumeRefused", "attach", "guard"]

_LAZY = {
    "guard": "chronicle.resume.adapters",
    "attach": "chronicle.resume.adapters.torch",
    "ResumeRefused": "chronicle.resume.checks.check",
}


def __getattr__(name: str) -> Any:
    """Import on first use, so that `import chronicle` stays cheap."""
    if name not in _LAZY:
        raise AttributeError(f"module 'chronicle.resume' has no attribute {name!r}")
    if name == "guard" and "accelerate" in sys.modules:
        import_module("chronicle.resume.adapters.accelerate")  # registers `log_with="chronicle"` with Accelerate
    return getattr(import_module(_LAZY[name]), name)

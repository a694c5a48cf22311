"""Flight recorder and time machine for training runs: journal, guard, launcher, detector, report, command line.

`rollback` reads and edits checkpoints; `bit_transformer` is the trainer that this package is tested on. `import chronicle`
imports no torch: `guard`, `attach` and `ResumeRefused` are loaded when they are first used. A script that records without a
guard needs `chronicle.log(step, loss=…)`, `config`, `note` and `alert`; `chronicle.open` reads a run.
"""

from importlib import import_module
from typing import Any

from chronicle_ml import require_own

__version__ = "0.1.0"
DISTRIBUTION = "chronicle-ml"
# and `open`, which `import *` must not hide
__all__ = ["ResumeRefused", "__version__", "alert", "attach", "config", "guard", "log", "note", "start"]

require_own("rollback")  # before a file of that name beside the user's script is imported in its place

_LAZY = {
    **dict.fromkeys(("guard", "attach", "ResumeRefused"), "chronicle.resume"),
    "start": "chronicle.recording",
    "open": "chronicle.runs",
}
_RECORDED = ("alert", "config", "log", "note")  # methods of this process's recording


def __getattr__(name: str) -> Any:
    """Load what a name needs on its first use, so that `import chronicle` stays fast."""
    if name in _LAZY:
        found = getattr(import_module(_LAZY[name]), name)
    elif name in _RECORDED:
        found = getattr(import_module("chronicle.recording").start(), name)
    else:
        raise AttributeError(f"module 'chronicle' has no attribute {name!r}")
    globals()[name] = found
    return found

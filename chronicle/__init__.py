"""The flight recorder and time machine of training runs: journal, guard, launcher, detector's host, report, command line.

`chronicle` tells the story; `rollback` (a pure library) reads and edits checkpoints; `bit_transformer` is the trainer it is
proven on. Importing this package imports no torch: `guard` and its friends load their library when they are first named.
"""

from importlib import import_module
from typing import Any

from chronicle_ml import require_own

__version__ = "0.1.0"
DISTRIBUTION = "chronicle-ml"
__all__ = ["ResumeRefused", "__version__", "attach", "guard"]

require_own("rollback")  # before a file of that name beside the user's script is imported in its place

_LAZY = {"guard": "chronicle.resume", "attach": "chronicle.resume", "ResumeRefused": "chronicle.resume"}


def __getattr__(name: str) -> Any:
    """Load the guard on first use, so that `import chronicle` stays in the milliseconds."""
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'chronicle' has no attribute {name!r}")

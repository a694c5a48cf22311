"""Flight recorder and time machine for training runs: journal, guard, launcher, detector, report, command line.

`rollback` reads and edits checkpoints; `bit_transformer` is the trainer that this package is tested on. `import chronicle`
imports no torch: `guard`, `attach` and `ResumeRefused` are loaded when they are first used.
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
    """Load the guard on first use, so that `import chronicle` stays fast."""
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'chronicle' has no attribute {name!r}")

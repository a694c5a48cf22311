"""Go back, as a library: open a run, plan from what is on disk, apply, undo, recover. Nothing here asks a person.

The commands and the seat for agents call these functions; how bytes change is in `rollback.transaction`.
"""

from chronicle.goback.applying import apply, recover, undo
from chronicle.goback.opened import OpenedRun, find_undoable, open_run
from chronicle.goback.planning import Target, has_guard, plan

__all__ = ["OpenedRun", "Target", "apply", "find_undoable", "has_guard", "open_run", "plan", "recover", "undo"]

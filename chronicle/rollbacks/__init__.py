"""Rollbacks as the journal knows them: may one begin now, what is recorded, what can be undone.

The edit itself is `rollback`'s; the verbs that a person types are in `chronicle.cli`.
"""

from chronicle.cli.transaction import Ground, find_open_intent, find_undoable, open_ground, with_launches

__all__ = ["Ground", "find_open_intent", "find_undoable", "open_ground", "with_launches"]

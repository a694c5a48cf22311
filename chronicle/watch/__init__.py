"""The detector's host: it tails what a trainer logs, keeps the journal informed and says which line to type.

`LiveWatch` is the supervisor's guest, `chronicle watch` the same thing for a person; `facts` turns the journal and the
checkpoints on disk into what `rollback.propose` needs. The engine itself is `rollback.detect`.
"""

from chronicle.watch.live import LiveWatch

__all__ = ["LiveWatch"]

"""torchtitan #811: resumed on another number of ranks, the loader state of those that are gone is dropped in silence."""

from pathlib import Path

from tests.reproductions.case import Answer, Case
from tests.reproductions.ranks import launch


def bare(folder: Path) -> None:
    assert launch(folder, "bare", "save")[0] == 0
    code, text = launch(folder, "bare", "load", ranks=1)
    assert code == 0 and "trained" in text, text


def guarded(folder: Path) -> str:
    code, text = launch(folder, "guarded", "save")
    assert code == 0, text
    return launch(folder, "guarded", "load", ranks=1)[1]


CASE = Case(
    row=17,
    source="torchtitan #811; prime-rl PR #1092; Megatron-Bridge PR #5637",
    pain="a resume on fewer ranks: the data position of the others is gone",
    without="the resume goes on with the position of rank 0",
    answer=Answer.REFUSED,
    says=("chronicle guard: resume refused", "(?i)world|ranks|processes"),
    bare=bare,
    guarded=guarded,
)

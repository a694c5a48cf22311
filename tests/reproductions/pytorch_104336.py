"""pytorch #104336, BLOOM 2022-03-24: replicas drift apart, no metric shows it, and the save looks whole."""

from pathlib import Path

from tests.reproductions.case import Answer, Case, incidents
from tests.reproductions.ranks import launch


def bare(folder: Path) -> None:
    code, text = launch(folder, "bare", "save", "drift")
    assert code == 0 and float(text.rpartition("ranks ")[2].split()[0]) > 1e-3, text


def guarded(folder: Path) -> str:
    _, text = launch(folder, "guarded", "save", "drift")
    said = [line for line in text.splitlines() if "chronicle" in line]
    return "\n".join([*said, *incidents(folder / "logs" / "run")])


CASE = Case(
    row=38,
    source="BLOOM 2022-03-24; nanotron #242; pytorch #104336",
    pain="replicas drift apart in the middle of a run",
    without="every rank trains another model; the checkpoint holds one of them",
    answer=Answer.NAMED,
    says=("(?i)replica|ranks",),
    bare=bare,
    guarded=guarded,
)

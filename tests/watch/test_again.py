"""Steps that a launch takes again, as its watch finds them in the rings of two launches."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from chronicle.journal import read_journal
from chronicle.journal.events import EntryKind, Incident, StepsRetaken, events_of
from chronicle.journal.writer import JournalWriter
from chronicle.paths import RunPaths
from chronicle.prints.launch_facts import VERSION
from chronicle.prints.ring import Print, RingWriter, SeenParts, facts_path, ring_path
from chronicle.watch.again import StepsAgain


class Run:
    """A run whose launches leave prints; the watch is that of launch 2."""

    def __init__(self, directory: Path, ranks: int = 2) -> None:
        self.paths, self.ranks, self.said = RunPaths(directory / "run"), ranks, list[str]()
        self.writer = JournalWriter(self.paths)
        self.again = StepsAgain(self.paths, 2, self._write, self.said.append)
        self.now = 0.0

    def _write(self, step: int | None, title: str, event: Any) -> None:
        self.writer.write(event, step=step, launch=2, title=title)

    def take(
        self,
        launch: int,
        first: int,
        last: int,
        *,
        begins: bool = True,
        others: Mapping[tuple[int, int], Any] | None = None,
    ) -> None:
        """A launch takes steps; `others`: fields of the print of (rank, step)."""
        for rank in range(self.ranks):
            header = {"rank": rank, "ranks": self.ranks, "launch": launch, "host": f"node-{launch}{rank}"}
            ring = RingWriter(ring_path(self.paths.launch_dir(launch), rank), header)
            if begins:
                ring.add(Print(step=first - 1, seen=SeenParts.BEGINS, weights=first - 1))
            for step in range(first, last + 1):
                known = {
                    "batch": step * 10 + rank,
                    "gradient": step,
                    "weights": step,
                    "torch": step,
                    "options": 1,
                    "loss": 2.0,
                }
                values = {**known, **((others or {}).get((rank, step)) or {})}
                ring.add(Print(step=step, seen=SeenParts.LOSS | SeenParts.TARGETS, batches=1, **values))
            ring.close()

    def poll(self) -> None:
        """The watch looks, long after it looked before."""
        self.now += 1000.0
        self.again.poll(now=lambda: self.now)

    @property
    def told(self) -> list[StepsRetaken]:
        """The entries."""
        return [event for _, event in events_of(read_journal(self.paths).entries, StepsRetaken)]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Launch 1 took steps 1 to 30."""
    made = Run(tmp_path)
    made.take(1, 1, 30)
    return made


def test_equal_steps_are_told_when_all_are_taken(run: Run) -> None:
    run.take(2, 21, 25)
    run.poll()
    assert not run.told
    run.take(2, 26, 31, begins=False)
    run.poll()
    (found,) = run.told
    assert (found.verdict, found.earlier, found.start, found.first, found.last, found.ranks) == (
        "equal",
        1,
        20,
        21,
        30,
        2,
    )
    assert run.said == ["chronicle: taken again after step 20 of launch 1: steps 21–30 taken again: equal on 2 ranks"]


def test_it_is_told_once(run: Run) -> None:
    run.take(2, 21, 31)
    run.poll()
    run.poll()
    run.again.finish()
    assert len(run.told) == 1


def test_the_end_of_the_launch_tells_what_was_taken(run: Run) -> None:
    run.take(2, 21, 25)
    run.again.finish()
    assert (run.told[0].verdict, run.told[0].last) == ("equal", 25)


def test_a_rank_that_differs_is_told_at_once_and_is_an_incident(run: Run) -> None:
    run.take(2, 21, 25, others={(1, 24): {"gradient": 9, "weights": 9}})
    run.poll()
    (found,) = run.told
    assert (found.verdict, found.apart_step, list(found.apart_ranks)) == ("some ranks differ", 24, [1])
    assert found.hosts == {"1": ["node-11", "node-21"]}
    incidents = [(entry.step, event.kind) for entry, event in events_of(read_journal(run.paths).entries, Incident)]
    assert incidents == [(24, "ranks-differ")]


def test_ranks_on_another_kind_of_machine_are_named_with_it_and_accused_of_nothing(run: Run) -> None:
    """Another kind of processor computes other bits: it is among what has changed."""
    for launch, kind in ((1, "A100"), (2, "H100")):
        for rank in range(2):
            path = ring_path(run.paths.launch_dir(launch), rank)
            path.unlink(missing_ok=True)
            RingWriter(path, {"rank": rank, "ranks": 2, "host": "n", "machine": kind if rank else "A100"}).close()
    run.take(1, 1, 30)
    run.take(2, 21, 25, others={(1, 24): {"gradient": 9, "weights": 9}})
    run.poll()
    (found,) = run.told
    assert found.verdict == "code, packages or settings differ"
    assert "kind of machine: A100 → H100 (1 of 2 ranks)" in found.why


def test_a_rank_is_not_named_before_the_others_took_the_step(run: Run) -> None:
    run.take(2, 21, 25, others={(1, 24): {"gradient": 9, "weights": 9}})
    ring = ring_path(run.paths.launch_dir(2), 0)
    whole = ring.read_bytes()
    ring.write_bytes(whole[: -2 * 64])  # rank 0 is at step 23
    run.poll()
    assert not run.told
    ring.write_bytes(whole)
    run.poll()
    assert run.told[0].verdict == "some ranks differ"


def test_another_state_is_no_beginning(run: Run) -> None:
    run.take(2, 21, 31, others=None)
    for rank in range(2):
        path = ring_path(run.paths.launch_dir(2), rank)
        path.unlink()
        ring = RingWriter(path, {"rank": rank, "ranks": 2})
        ring.add(Print(step=20, seen=SeenParts.BEGINS, weights=999))
        ring.add(Print(step=21, weights=5))
    run.poll()
    assert not run.told and not run.said


def test_an_attempt_of_the_same_launch_is_compared_with_the_one_before(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.take(2, 1, 30)
    run.take(2, 21, 31)
    run.poll()
    assert (run.told[0].verdict, run.told[0].earlier) == ("equal", 2)


def test_a_new_attempt_is_told_again(run: Run) -> None:
    run.take(2, 21, 31)
    run.poll()
    run.take(2, 26, 32)
    run.poll()
    assert [found.start for found in run.told] == [20, 25]


def test_a_first_launch_has_nothing_to_compare(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.take(2, 1, 9)
    run.poll()
    run.again.finish()
    assert not read_journal(run.paths).entries


def test_a_pass_over_many_ranks_is_divided(tmp_path: Path) -> None:
    run = Run(tmp_path, ranks=6)
    run.take(1, 1, 30)
    run.take(2, 21, 31)
    ticks = iter(range(10_000, 20_000))
    calls = 0
    while not run.told:
        run.again.poll(now=lambda: float(next(ticks)))
        calls += 1
    assert calls >= 6
    assert run.told[0].ranks == 6
    kinds = {entry.kind for entry in read_journal(run.paths).entries}
    assert kinds == {EntryKind.RETAKEN}


def test_what_computes_otherwise_is_named_at_each_relaunch(run: Run) -> None:
    """Also where no step is taken again: launch 2 goes on from the last one."""
    facts = {"code": {}, "files": {}, "environment": {}, "directory": "/", "packages": {"torch": "2.12", "numpy": "2"}}
    then = facts | {"v": VERSION, "libraries": {"libc.so.6": "a"}, "arithmetic": {"kernel": "6.1", "processor": "x"}}
    arithmetic = {"kernel": "6.8", "processor": "x"}
    now = then | {"packages": {"torch": "2.13"}, "libraries": {"libc.so.6": "b"}, "arithmetic": arithmetic}
    run.take(2, 31, 33)
    facts_path(run.paths.launch_dir(1)).write_text(json.dumps(then))
    facts_path(run.paths.launch_dir(2)).write_text(json.dumps(now))
    run.poll()
    run.poll()
    words = "torch: 2.12 → 2.13; `libc.so.6` has changed; kernel: 6.1 → 6.8"
    assert run.said == [f"chronicle: computes otherwise than launch 1: {words}"]

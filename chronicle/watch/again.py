"""Steps that this launch takes again: compared with the prints of the launch that took them first, while they come.

A bounded number of ranks is read at each call, and a pass over all of them is followed by a pause that is many times as long:
the supervisor that calls this has signals to look at. How prints are compared and judged is in `chronicle/prints/retaken.py`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path

from chronicle.errors import ChronicleError
from chronicle.journal.entries import Entry
from chronicle.journal.events import (
    EntryKind,
    Incident,
    JournalEvent,
    LaunchEnd,
    RollbackReceipt,
    StepsRetaken,
    events_of,
)
from chronicle.journal.lineage import compute_lineage
from chronicle.journal.reader import read_journal
from chronicle.paths import RunPaths
from chronicle.prints.launch_facts import changed_facts, read_facts
from chronicle.prints.retaken import (
    RankRetaken,
    Retaken,
    RetakenCase,
    RetakenVerdict,
    Rise,
    find_segment,
    judge_retaken,
    retake_rank,
    rise_in,
)
from chronicle.prints.ring import Print, Ring, read_ring
from rollback.detect import Tier

BUDGET_SECONDS = 0.03  # of one call
PAUSE_SECONDS, PAUSE_FACTOR = 5.0, 50.0  # after a pass: so long, and so many times as long as it took
FINISH_SECONDS = 10.0  # at the end of a launch: .25 s a rank at most
LOOK_BACK = 20  # launches in which the steps are looked for
MAY_CHANGE = (RetakenVerdict.EQUAL, RetakenVerdict.CLOSE, RetakenVerdict.RESULT)  # by later steps
RISES = (Tier.WARN.value, Tier.PROPOSE.value)
NO_STEP = 1 << 32  # no print has it: only beginnings are read
COMPUTES = ("package", "library", "arithmetic")  # kinds of facts, named at each relaunch

Write = Callable[[int | None, str, JournalEvent], object]


class StepsAgain:
    """One launch. `poll` compares some ranks, `finish` the rest; both may raise what reading a file raises."""

    def __init__(self, paths: RunPaths, launch: int, write: Write, say: Callable[[str], None]) -> None:
        self._paths, self._launch, self._write, self._say = paths, launch, write, say
        self._begins: Print | None = None  # of the segment that is compared
        self._earlier: int | None = None  # the launch that took its steps first; None: nobody did
        self._told = False
        self._pass: Iterator[RankRetaken] | None = None
        self._ranks: list[RankRetaken] = []
        self._num_ranks = (0, 0)  # then and now, as the rings say
        self._began, self._pause_until = 0.0, 0.0
        self._are_changes_named = False

    def poll(self, *, now: Callable[[], float] = time.monotonic) -> None:
        """Compare ranks for a moment."""
        if now() < self._pause_until:
            return
        self._name_changes()
        if self._pass is None and not self._begin(now()):
            self._pause_until = now() + PAUSE_SECONDS
            return
        if self._go_on(now() + BUDGET_SECONDS, now):
            self._judge(is_over=False)
            self._pause_until = now() + max(PAUSE_SECONDS, PAUSE_FACTOR * (now() - self._began))

    def finish(self) -> None:
        """The launch has ended: compare the ranks once more, as many as there is time for, unless it was told already."""
        self._pass = None
        self._name_changes()
        if self._begin(0.0):
            self._go_on(time.monotonic() + FINISH_SECONDS, time.monotonic)
            self._judge(is_over=True)

    def _name_changes(self) -> None:
        """Say what computes otherwise than in the launch before: packages, libraries, driver, kernel, kind of processor."""
        after = None if self._are_changes_named else read_facts(self._paths.launch_dir(self._launch))
        if after is None:
            return  # it was said, or no step is taken yet
        self._are_changes_named = True
        for number in range(self._launch - 1, max(0, self._launch - LOOK_BACK), -1):
            before = read_facts(self._paths.launch_dir(number))
            if before is None:
                continue
            words = [fact.words for fact in changed_facts(before, after, None) if fact.kind in COMPUTES]
            if words:
                self._say(f"chronicle: computes otherwise than launch {number}: {'; '.join(words)}")
            return

    def _go_on(self, until: float, now: Callable[[], float]) -> bool:
        """Whether the pass is over."""
        assert self._pass is not None
        for rank in self._pass:
            self._ranks.append(rank)
            if now() > until:
                return False
        self._pass = None
        return True

    def _begin(self, now: float) -> bool:
        """Begin a pass, where this launch takes steps again and it was not told yet."""
        own = self._paths.launch_dir(self._launch)
        first = min(own.glob("prints-*.ring"), default=None)
        begun = () if first is None else read_ring(first, since=NO_STEP).begins()
        if first is None or not begun:
            return False
        begins = begun[-1]
        if self._begins is None or begins.seq != self._begins.seq:  # the launch, or another attempt of its ranks
            self._begins, self._told = begins, False
            self._earlier = self._find(begins, first.name)
        if self._told or self._earlier is None:
            return False
        self._ranks, self._began, self._pass = [], now, self._compare(own, self._earlier, begins.step)
        return True

    def _find(self, begins: Print, name: str) -> int | None:
        """The newest launch, or earlier attempt of this one, that took steps from the state with which this one began."""
        known = self._known(begins.step)
        for number in range(self._launch, max(0, self._launch - LOOK_BACK), -1):
            ring = _read_or_none(self._paths.launch_dir(number) / name, begins.step)
            segments = [] if ring is None else ring.segments()[: -1 if number == self._launch else None]
            if find_segment(segments, begins, is_known=number == known) is not None:
                return number
        return None

    def _known(self, start: int) -> int | None:
        """The launch that saved the checkpoint which this one loaded, as the guard recorded its identity."""
        spans = compute_lineage(read_journal(self._paths).entries).launches
        loaded = next((span.loaded for span in spans if span.number == self._launch), None)
        return loaded[0] if loaded is not None and loaded[1] == start else None

    def _compare(self, own: Path, earlier: int, start: int) -> Iterator[RankRetaken]:
        """One rank after the other."""
        then_dir, known = self._paths.launch_dir(earlier), self._known(start) == earlier
        for path in sorted(own.glob("prints-*.ring")):
            now = read_ring(path, since=start)
            then = now if then_dir == own else _read_or_none(then_dir / path.name, start)
            segments = [] if then is None else then.segments()[: -1 if then_dir == own else None]
            mine = now.segments()[-1]
            found = None if mine.begins is None else find_segment(segments, mine.begins, is_known=known)
            if then is None or found is None:
                yield RankRetaken(rank=now.rank)
                continue
            self._num_ranks = int(then.header.get("ranks") or 0), int(now.header.get("ranks") or 0)
            hosts, machines = _both(then, now, "host"), _both(then, now, "machine")
            yield retake_rank(now.rank, found, mine, hosts=hosts, machines=machines)

    def _judge(self, *, is_over: bool) -> None:
        """Say what was found once it is settled: what differs has been taken by every rank, or the steps are over."""
        assert self._begins is not None and self._earlier is not None
        entries = read_journal(self._paths).entries
        case = self._case(entries)
        if not case.compared:
            return
        found = judge_retaken(case)
        steps_then = max(rank.taken[0] for rank in case.compared)
        steps_now = min(rank.taken[1] for rank in case.compared)
        is_settled = steps_now >= steps_then or case.came_again is not None
        if found.verdict not in MAY_CHANGE and case.first is not None:
            is_settled = steps_now >= case.first.step
        if is_settled or is_over:
            self._told = True
            self._tell(case, found)

    def _case(self, entries: Sequence[Entry]) -> RetakenCase:
        assert self._begins is not None and self._earlier is not None
        rises = [
            Rise(event.onset_step, event.peak_step, event.excess) for entry, event in events_of(entries, Incident)
            if entry.launch == self._earlier and event.tier in RISES and event.onset_step is not None
            and event.peak_step is not None and event.excess is not None and "loss" in " ".join(event.channels)
        ]  # fmt: skip
        return RetakenCase(
            earlier=self._earlier,
            start=self._begins.step,
            ranks=self._ranks,
            ranks_then=self._num_ranks[0],
            ranks_now=self._num_ranks[1],
            changed=self._changed(entries),
            skipped=self._skips(entries),
            rise=rise_in(rises, self._ranks),
        )

    def _changed(self, entries: Sequence[Entry]) -> list[tuple[str, str]]:
        """(kind, words) of what differs between the two launches, as their first ranks recorded it, and kinds of machines."""
        assert self._earlier is not None
        kinds = Counter(rank.machines for rank in self._ranks if len(set(rank.machines)) > 1)
        of = f"of {len(self._ranks)} ranks"
        moved = [("arithmetic", f"kind of machine: {' → '.join(one)} ({kinds[one]} {of})") for one in kinds]
        before = read_facts(self._paths.launch_dir(self._earlier))
        after = read_facts(self._paths.launch_dir(self._launch))
        if before is None or after is None or self._earlier == self._launch:
            return moved
        ends = [entry.ts for entry, _ in events_of(entries, LaunchEnd) if entry.launch == self._earlier]
        ended = datetime.fromisoformat(ends[-1]).timestamp() if ends else None
        return moved + [(fact.kind, fact.words) for fact in changed_facts(before, after, ended)]

    def _skips(self, entries: Sequence[Entry]) -> bool:
        """Whether a rollback between the two launches skips batches, or deals them anew."""
        assert self._earlier is not None
        begun = [place for place, entry in enumerate(entries) if entry.kind == EntryKind.LAUNCH_START
                 and entry.launch is not None and entry.launch > self._earlier]  # fmt: skip
        starts = [place for place in begun if entries[place].launch == self._launch]
        since = next((place for place, entry in enumerate(entries) if entry.launch == self._earlier), 0)
        between = entries[since : starts[-1] if starts else len(entries)]
        return any(
            bool(receipt.skip_batches) or receipt.reshuffle for _, receipt in events_of(between, RollbackReceipt)
        )

    def _tell(self, case: RetakenCase, found: Retaken) -> None:
        """One line, one entry; an incident where ranks differ."""
        hosts = {str(rank.rank): list(rank.hosts) for rank in case.ranks if rank.rank in found.ranks}
        event = StepsRetaken(
            verdict=found.verdict.value,
            why=found.why,
            earlier=case.earlier,
            start=case.start,
            first=case.steps[0],
            last=max(rank.last_step for rank in case.compared),
            ranks=len(case.compared),
            parts=tuple(sorted(case.parts)),
            apart_step=None if case.first is None else case.first.step,
            apart_part=case.part,
            apart_ranks=found.ranks,
            hosts=hosts,
            rise=None if case.rise is None else case.rise.onset,
            came_again=case.came_again,
            changed=tuple(words for _, words in case.changed),
        )
        title = f"taken again after step {case.start:,} of launch {case.earlier}: {found.why}"
        self._write(case.start, title, event)
        self._say(f"chronicle: {title}")
        if found.verdict is RetakenVerdict.RANKS:
            incident = Incident.from_json({"kind": "ranks-differ", "tier": Tier.WARN.value, "onset_step": found.step})
            self._write(found.step, f"{Tier.WARN.value}: {found.why}", incident)


def _read_or_none(path: Path, since: int) -> Ring | None:
    try:
        return read_ring(path, since=since)
    except ChronicleError:
        return None


def _both(then: Ring, now: Ring, name: str) -> tuple[str, str]:
    """A word of both headers; equal where one of them lacks it."""
    before, after = str(then.header.get(name) or ""), str(now.header.get(name) or "")
    return (before, after) if before and after else (after, after)

"""The story of a run as one value: its launches, lineage, LR ledger, headline values and open matters.

`assemble` computes it from the entries and from what the per-step logs contain; it reads no file (`chronicle.story.read` does).
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from chronicle.journal import Entry, Journal, JournalProblem, LaunchSpan, Lineage, compute_lineage
from chronicle.journal.events import (
    LAUNCHES,
    NOTHING,
    CheckpointSaved,
    EndCause,
    EntryKind,
    GuardVerdict,
    LaunchEnd,
    LaunchStart,
    RunFork,
    events_of,
    find_open_transaction,
    is_more_telling,
    words_of,
)
from chronicle.journal.lr_ledger import LedgerLine, LrLedger, compute_lr_ledger
from chronicle.journal.place import Parent
from chronicle.metrics import Point
from chronicle.story.matters import (
    Intervention,
    Matter,
    OpenProposal,
    answer_matters,
    collect_interventions,
    collect_matters,
    event_of,
    open_proposal,
)
from chronicle.story.plain import plain
from rollback.channels import Role, value_of

PointsUntil = Callable[[int, int], Sequence[Point]]  # (launch, step) -> last points at or before that step


class SavedCheckpoint(NamedTuple):
    """A checkpoint that a launch saved."""

    step: int
    launch: int | None
    path: str
    entry_id: str
    data: Mapping[str, Any]
    kept: bool = True  # its step belongs to the lineage


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchStory:
    """One launch. `verdict` is its newest guard verdict (`passed`, `unverified`, `warned`, `refused`); None without a guard."""

    number: int
    span: LaunchSpan
    started: str = ""
    ended: str = ""
    title: str = ""
    host: str = ""
    silent_hosts: tuple[str, ...] = ()  # nodes that started and recorded no end
    argv: tuple[str, ...] = ()
    git_commit: str = ""
    exit_code: int | None = None
    signal: str = ""
    cause: str = ""  # an `EndCause`; "" where none was recorded
    because: str = ""  # what was seen of it
    verdict: str | None = None
    verdict_entry: Entry | None = None
    lr: LedgerLine | None = None
    checkpoints: tuple[SavedCheckpoint, ...] = ()
    alive: bool = False
    imported: bool = False

    @property
    def resumed(self) -> bool:
        """Whether it continued from a checkpoint."""
        return (self.span.start_step or 0) > 0  # -1: its first step was 0

    @property
    def verified(self) -> bool:
        """Whether a guard compared its memory with the saved state and passed it."""
        if self.verdict != "passed" or self.verdict_entry is None:
            return False
        return GuardVerdict.of(self.verdict_entry).verified is not False

    @property
    def outcome(self) -> str:
        """The state of the launch in a few words."""
        if self.alive:
            return "running"
        if not self.ended:
            return "no end recorded"
        how = "ended" if self.exit_code is None else f"ended with code {self.exit_code}"
        how = f"ended by {plain(self.signal)}" if self.signal else how
        how = f"{how}: {plain(self.cause)}" if self.cause not in ("", EndCause.ENDED) else how
        return f"{how}, no end recorded on {plain(', '.join(self.silent_hosts))}" if self.silent_hosts else how


def tell_launches(
    entries: Iterable[Entry], lineage: Lineage, ledger: LrLedger, alive: Sequence[int] = ()
) -> tuple[LaunchStory, ...]:
    """Every launch in order of its number."""
    lines = {line.launch: line for line in ledger.lines}
    told = {
        span.number: LaunchStory(number=span.number, span=span, lr=lines.get(span.number), alive=span.number in alive)
        for span in lineage.launches
    }
    saved: dict[int, list[SavedCheckpoint]] = {}
    checkpoint = EntryKind.CHECKPOINT
    for entry in entries:
        if entry.launch not in told or entry.launch is None:
            continue
        if entry.kind == checkpoint:
            saved.setdefault(entry.launch, []).extend(saved_checkpoint(entry, lineage))
        elif entry.kind in LAUNCHES:
            told[entry.launch] = _learn(told[entry.launch], entry)
    return tuple(replace(told[n], checkpoints=tuple(saved.get(n, ()))) for n in sorted(told))


def _learn(launch: LaunchStory, entry: Entry) -> LaunchStory:
    """The launch with what one of its entries says."""
    if entry.kind == EntryKind.LAUNCH_START:
        return _started(launch, entry, LaunchStart.of(entry))
    if entry.kind == EntryKind.LAUNCH_END:
        return _ended(launch, entry, LaunchEnd.of(entry))
    if entry.kind == EntryKind.GUARD_VERDICT:
        return replace(launch, verdict=GuardVerdict.of(entry).verdict or "unknown", verdict_entry=entry)
    return launch


def _started(launch: LaunchStory, entry: Entry, start: LaunchStart) -> LaunchStory:
    if launch.started:  # another node of it
        return replace(launch, silent_hosts=(*launch.silent_hosts, start.host))
    return replace(
        launch,
        silent_hosts=(start.host,) if start.host else (),
        started=entry.ts,
        title=entry.title,
        host=start.host,
        argv=start.argv,
        git_commit=start.git_commit or "",
        imported=start.imported,
    )


def _ended(launch: LaunchStory, entry: Entry, end: LaunchEnd) -> LaunchStory:
    silent = tuple(host for host in launch.silent_hosts if host != end.host) if end.host else ()
    launch = replace(launch, silent_hosts=silent, ended=entry.ts, alive=False)
    if launch.exit_code or launch.signal:  # another node failed first: that is how the launch ended
        more = is_more_telling(end.cause, launch.cause) and end.exit_code != 0
        return replace(launch, cause=end.cause or "", because=end.because) if more else launch
    signal = f"signal {end.signal}" if isinstance(end.signal, int) else str(end.signal or "")
    return replace(launch, exit_code=end.exit_code, signal=signal, cause=end.cause or "", because=end.because)


def saved_checkpoint(entry: Entry, lineage: Lineage) -> Iterable[SavedCheckpoint]:
    """The checkpoint of an entry; nothing if the entry has no step."""
    if entry.step is not None:
        yield SavedCheckpoint(
            step=entry.step,
            launch=entry.launch,
            path=CheckpointSaved.of(entry).path,
            entry_id=entry.id,
            kept=entry.launch is not None and lineage.contains(entry.launch, entry.step),
            data=entry.data,
        )


# --- the whole run ------------------------------------------------------------------------------------------------------


class Headline(NamedTuple):
    """The newest step of the lineage. `values` are the newest values of each channel at or before it."""

    step: int = 0
    launch: int | None = None
    values: Mapping[str, float] = NOTHING
    measured_step: int | None = None  # the step of the newest of `values`
    time: float | None = None

    @property
    def loss(self) -> float | None:
        """The training loss, under whatever name it is logged."""
        return value_of(self.values, Role.LOSS)

    @property
    def lr(self) -> float | None:
        """The learning rate, under whatever name it is logged."""
        return value_of(self.values, Role.LR)


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """All that `status`, `log`, `render` and `report` show of a run."""

    run: str
    entries: tuple[Entry, ...]
    problems: tuple[JournalProblem, ...]
    heads: tuple[tuple[str, str], ...]
    lineage: Lineage
    ledger: LrLedger
    launches: tuple[LaunchStory, ...]  # in order of their numbers
    headline: Headline
    matters: tuple[Matter, ...]
    interventions: tuple[Intervention, ...]
    intent: Entry | None
    proposal: OpenProposal | None
    parent: Parent | None = None  # the other run whose checkpoint the present weights descend from

    def launch(self, number: int | None) -> LaunchStory | None:
        """The launch with this number."""
        place = len(self.launches) if number is None else bisect_left(self.launches, number, key=lambda one: one.number)
        return self.launches[place] if place < len(self.launches) and self.launches[place].number == number else None

    @property
    def lr_path(self) -> tuple[float | None, ...]:
        """Cumulative LR factors along the lineage, a repeated one once: 1 → 0.75 → unknown → 0.375."""
        kept = {interval.launch for interval in self.lineage.kept}
        out: list[float | None] = []
        for line in self.ledger.lines:
            if line.launch in kept and (not out or out[-1] != line.factor):
                out.append(line.factor)
        return tuple(out)

    @property
    def last_launch(self) -> LaunchStory | None:
        """The launch that was started last."""
        return self.launches[-1] if self.launches else None

    @property
    def is_dated(self) -> bool:
        """Whether it is known when the launches ran: of a log without times there is only the date of the import."""
        last, head = self.last_launch, self.headline
        return last is None or not last.imported or head.measured_step is None or head.time is not None

    @property
    def last_checkpoint(self) -> SavedCheckpoint | None:
        """The newest checkpoint of the lineage."""
        kept = [saved for launch in self.launches for saved in launch.checkpoints if saved.kept]
        return max(kept, key=lambda saved: saved.step, default=None)

    @property
    def hardware(self) -> tuple[Entry, ...]:
        """Entries about hardware that have a step: hardware events and notes with the tag `hardware`."""
        kind = EntryKind.HARDWARE
        with_step = (entry for entry in self.entries if entry.step is not None)
        return tuple(entry for entry in with_step if entry.kind == kind or "hardware" in words_of(entry).tags)

    @property
    def unverified(self) -> tuple[LaunchStory, ...]:
        """Resumed launches of the lineage that no guard verified."""
        kept = {interval.launch for interval in self.lineage.kept}
        return tuple(x for x in self.launches if x.number in kept and x.resumed and not x.verified and not x.imported)

    @property
    def open_ids(self) -> tuple[str, ...]:
        """What waits for an outcome: the first ids of open incidents, then those of rollbacks."""
        waiting = [one.entry.id for one in self.interventions if one.open]
        return (*(matter.first_id for matter in self.open_matters), *waiting)

    @property
    def open_matters(self) -> tuple[Matter, ...]:
        """Incidents that are still open; a mere notice only while it is diverging."""
        return tuple(matter for matter in self.matters if matter.open and not _is_mere_notice(matter))


def assemble(
    journal: Journal,
    observed: Mapping[int, tuple[int, int]],
    points_until: PointsUntil,
    alive: Sequence[int] = (),
) -> Story:
    """The story of a journal.

    `observed`: first and last logged step by launch. `alive`: launches with a fresh heartbeat.
    """
    lineage = compute_lineage(journal.entries, observed)
    parent = _parent_run(journal.entries, lineage)
    ledger = compute_lr_ledger(journal.entries, lineage)
    return Story(
        run=journal.run,
        entries=journal.entries,
        problems=journal.problems,
        heads=journal.heads,
        lineage=lineage,
        ledger=ledger,
        launches=tell_launches(journal.entries, lineage, ledger, alive),
        headline=_headline(lineage, points_until, parent),
        matters=answer_matters(collect_matters(journal.entries), lineage),
        interventions=collect_interventions(journal.entries),
        intent=find_open_transaction(journal.entries),
        proposal=open_proposal(journal.entries),
        parent=parent,
    )


def _parent_run(entries: Sequence[Entry], lineage: Lineage) -> Parent | None:
    """The run that the lineage begins from: the one that a guard saw loaded, else the one named at `chronicle init`."""
    declared = [Parent.from_json(fork.parent) for _, fork in events_of(entries, RunFork) if fork.parent and not fork.copied]
    named = declared[-1] if declared else None
    if not lineage.kept:
        return named
    root = next((span for span in lineage.launches if span.number == lineage.kept[0].launch), None)
    if root is None or root.parent_run is None:
        begins = named is not None and named.step is not None and named.step < lineage.kept[0].first
        return named if begins and (root is None or root.inferred) else None
    loads = [event.loaded for entry, event in events_of(entries, GuardVerdict) if entry.launch == root.number and event.loaded]
    seen = next((Parent.from_json(loaded) for loaded in reversed(loads) if loaded.get("run_id") == root.parent_run), None)
    if seen is None or named is None or named.run_id != seen.run_id:
        return seen
    return seen._replace(path=named.path)


def _is_mere_notice(matter: Matter) -> bool:
    event = event_of(matter.entry)
    return event.tier == "notice" and event.status != "diverging"


def _headline(lineage: Lineage, points_until: PointsUntil, parent: Parent | None) -> Headline:
    """The newest measured values of the lineage; abandoned steps are left out."""
    for interval in reversed(lineage.kept):
        points = [p for p in points_until(interval.launch, interval.last) if p.step >= interval.first]
        if points:
            values: dict[str, float] = {}
            for point in points:
                values |= point.values
            return Headline(
                step=lineage.head_step,
                launch=lineage.head_launch,
                values=values,
                measured_step=points[-1].step,
                time=points[-1].time,
            )
    begun = 0 if parent is None else parent.step or 0
    return Headline(step=lineage.head_step or begun, launch=lineage.head_launch)

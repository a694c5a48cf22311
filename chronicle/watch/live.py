"""Watch one launch while it runs: fold its log, keep the journal informed, say the line to type.

The supervisor polls it once a second and stays alive whatever happens here: `poll` raises nothing, it says once what
went wrong and goes on with what still works.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from chronicle.journal.lineage import Interval
from chronicle.journal.reader import read_journal
from chronicle.journal.writer import JournalWriter
from chronicle.metrics.log import Point
from chronicle.paths import RunPaths
from chronicle.watch.advice import Adviser
from chronicle.watch.hooks import Hooks
from chronicle.watch.incidents import IncidentLog
from chronicle.watch.past import kept_before, last_rows, read_past
from chronicle.watch.promise import LrPromise, lr_ratio_of, read_promise, warm_until
from chronicle.watch.restart import LiveRestart
from chronicle.watch.snapshots import SnapshotKeeper, load_snapshot
from chronicle.watch.tail import Tail
from rollback.detect import Detector, Event, Tier


def say_on_stderr(line: str) -> None:
    """One line for the person at the terminal."""
    print(line, file=sys.stderr, flush=True)


def _is_kept(kept: Sequence[Interval], step: int) -> bool:
    """A state belongs to the present weights only if its step does."""
    return any(interval.first <= step <= interval.last for interval in kept)


class LiveWatch:
    """`poll()` folds what was logged since the last call and returns the events it opened or changed."""

    def __init__(
        self, paths: RunPaths, launch: int, writer: JournalWriter, *, checkpoints_dir: Path | None = None,
        say: Callable[[str], None] = say_on_stderr, hooks: Mapping[str, str] | None = None,
        options: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self.paths, self.launch = paths, launch
        self.detector = Detector()
        self._tail = Tail(paths.metrics_path(launch))
        self._incidents = IncidentLog(writer, launch)
        self._adviser = Adviser(paths, launch, writer, checkpoints_dir, options)
        self._say = say
        self._hooks = Hooks(hooks or {}, lambda line: say(f"chronicle: {line}"))
        self._promise = LrPromise(0, ())
        self._snapshots = SnapshotKeeper(paths, launch)
        self._restart = LiveRestart(
            lambda step, title, data: writer.append("guard.log", step=step, launch=launch, title=title, data=data), say
        )
        self._journal_bytes = 0
        self._begun = False
        self._complained: set[str] = set()

    def poll(self) -> list[Event]:
        """Never raises: a broken detector must not take the run with it."""
        try:
            return self._fold(self._tail.read())
        except Exception as problem:  # noqa: BLE001 see above
            self._complain(problem)
            return []

    def finish(self) -> list[Event]:
        """The launch has ended: fold the rest of its log and judge what is still open. Never raises."""
        events = self.poll()
        try:
            events += self._report(self.detector.finish())
            self._restart.finish()
        except Exception as problem:  # noqa: BLE001 see above
            self._complain(problem)
        return events

    def end_hooks(self) -> None:
        """Wait a little for hooks that still run."""
        self._hooks.finish()

    def _fold(self, points: list[Point]) -> list[Event]:
        changed: list[Event] = []
        for point in points:
            if not self._begun:
                self._begin(point.step)
            self._adviser.note(point)
            values = self._promise.add_to(point.step, point.values)
            changed += self._report(self.detector.feed(point.step, values, time=point.time, launch=self.launch))
            self._snapshots.note(point.step, self.detector)
            self._restart.feed(point)
        if points:
            self._save_snapshots()
        return changed

    def _save_snapshots(self) -> None:
        """Look for new checkpoints in the journal, only when it has grown."""
        size = sum(path.stat().st_size for path in self.paths.journal_dir.glob("*.jsonl"))
        if size != self._journal_bytes:
            self._journal_bytes = size
            entries = read_journal(self.paths).entries
            self._snapshots.save_for(entry for entry in entries if entry.launch in (None, self.launch))

    def _begin(self, first_step: int) -> None:
        """The first point says where the launch starts: its baselines are those of the steps it continues."""
        self._begun = True
        self._promise = read_promise(self.paths.contract_path, first_step)
        entries = read_journal(self.paths).entries
        kept = kept_before(self.paths, entries, self.launch)
        verdict = next((e for e in reversed(entries) if e.kind == "guard.verdict" and e.launch == self.launch), None)
        told = verdict.step if verdict is not None else None
        self._restart.begin(
            last_rows(self.paths, kept, told if told is not None else first_step - 1),
            max((interval.last for interval in kept), default=0), first_step, resume_step=told,
            lr_ratio=lr_ratio_of(self.paths.contract_path, first_step),
            warm_until=warm_until(self.paths.contract_path, first_step),
        )  # fmt: skip
        loaded = load_snapshot(self.paths, {interval.launch for interval in kept}, first_step)
        after = -1
        if loaded is not None and _is_kept(kept, loaded[0]):
            after, self.detector = loaded
        for launch, point in read_past(self.paths, kept, first_step, after=after):
            self.detector.feed(point.step, point.values, time=point.time, launch=launch)
        self._incidents.forget(self.detector.events)

    def _report(self, events: list[Event]) -> list[Event]:
        """Into the journal what is new about each, then the proposal, then one line on stderr."""
        kept: dict[int, Event] = {}
        for event in events:
            if self._incidents.is_old(event):
                continue
            kept[event.id] = event
            if not self._incidents.record(event):
                continue
            self._hooks.call(event)
            if event.tier is Tier.PROPOSE:
                self._propose(event)
            elif event.tier is Tier.WARN:
                self._say(f"chronicle: {self._incidents.title(event)}")
        return list(kept.values())

    def _propose(self, event: Event) -> None:
        advice = self._adviser.advise(self.detector.events, event)
        if advice is None:
            return
        self._say(f"chronicle: {self._incidents.title(event)}")
        self._say(f"chronicle: {advice}")

    def _complain(self, problem: Exception) -> None:
        text = f"{type(problem).__name__}: {problem}"
        if text not in self._complained:
            self._complained.add(text)
            self._say(f"chronicle: the live detector stumbled: {text}")

"""The live watch of one launch: fold its log, write incidents to the journal, print the command to type, call hooks.

`launch.follower` polls it once a second. `poll` and `finish` do not raise: they report a failure once and go on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from chronicle.journal.entries import Entry
from chronicle.journal.events import EntryKind, Incident, JournalEvent, LaunchStart, events_of
from chronicle.journal.reader import read_journal
from chronicle.journal.writer import JournalWriter
from chronicle.metrics.log import Point
from chronicle.paths import RunPaths
from chronicle.watch.advice import Adviser, breach_events, is_breach
from chronicle.watch.again import StepsAgain
from chronicle.watch.follow import Tail
from chronicle.watch.restart import (
    LiveRestart,
    LrPromise,
    RestartCheck,
    compared_exactly,
    kept_before,
    last_rows,
    lr_ratio_of,
    promise_of,
    read_contract,
    read_past,
    warm_until,
)
from rollback.channels import EXPECTED_LR
from rollback.detect import Detector, Event, Status, Tier


def say_on_stderr(line: str) -> None:
    """Print one line on stderr."""
    print(line, file=sys.stderr, flush=True)


class LiveWatch:
    """Watches one launch: `poll()` folds what was logged since the last call and returns the events it opened or changed."""

    def __init__(
        self, paths: RunPaths, launch: int, writer: JournalWriter, *, checkpoints_dir: Path | None = None,
        say: Callable[[str], None] = say_on_stderr, hooks: Mapping[str, str] | None = None,
        options: tuple[str, ...] = (), before: Sequence[Entry] = (),
    ) -> None:  # fmt: skip
        """`before`: the entries of this launch, where another watch of it has died: what they tell is not told again."""
        self.paths, self.launch = paths, launch
        self.detector = Detector()
        self._tail = Tail(paths.metrics_path(launch))
        self._incidents = IncidentLog(writer, launch, before)
        self._adviser = Adviser(paths, launch, writer, checkpoints_dir, options)
        self._adviser.remember(before)
        told = {(entry.kind, entry.step, entry.title) for entry in before}
        self._say = say
        self._hooks = Hooks(hooks or {}, lambda line: say(f"chronicle: {line}"))
        self._promise = LrPromise(0, ())

        def write(step: int | None, title: str, event: JournalEvent) -> None:
            if (event.KIND, step, title) not in told:
                writer.write(event, step=step, launch=launch, title=title)

        self._restart = LiveRestart(launch, write, say)
        self._again = StepsAgain(paths, launch, write, say)
        self._journal_bytes = 0
        self._breaches: list[Entry] = []  # found by the guard, not reported yet
        self._seen_breaches: set[str] = set()
        self._begun = False
        self._complained: set[str] = set()

    def poll(self) -> list[Event]:
        """Fold the new points; a problem is printed, not raised: a broken detector must not end the run."""
        self._look_again(self._again.poll)
        try:
            return self._fold(self._tail.read())
        except Exception as problem:  # noqa: BLE001 see above
            self._complain(problem)
            return []

    def finish(self) -> list[Event]:
        """Fold the rest of the log and judge the open events: the launch has ended. A problem is printed, not raised."""
        events = self.poll()
        try:
            events += self._report(self.detector.finish())
            self._restart.finish()
        except Exception as problem:  # noqa: BLE001 see above
            self._complain(problem)
        self._look_again(self._again.finish)
        return events

    def _look_again(self, look: Callable[[], None]) -> None:
        """Compare steps that are taken again; a problem is printed."""
        try:
            look()
        except Exception as problem:  # noqa: BLE001 see above
            self._complain(problem, what="the comparison of steps that are taken again")

    def _fold(self, points: list[Point]) -> list[Event]:
        changed: list[Event] = []
        for point in points:
            if not self._begun:
                self._begin(point.step)
            values = self._promise.add_to(point.step, point.values)
            self._adviser.note(point, values.get(EXPECTED_LR))
            changed += self._report(self.detector.feed(point.step, values, time=point.time, launch=self.launch))
            self._restart.feed(point)
        self._find_breaches()
        return changed + self._report_breaches()

    def _report_breaches(self) -> list[Event]:
        """Weights that the guard saw spoilt: it has written the incident, the proposal and the hooks are ours."""
        events = breach_events(self._breaches, None, after=self.detector.events)
        self._breaches = []
        for event in events:
            self._hooks.call(event)
            self._propose(event, (*self.detector.events, *events))
        return events

    def _find_breaches(self) -> None:
        """Look for what the guard wrote to the journal; it is read only when it has grown."""
        size = sum(path.stat().st_size for path in self.paths.journal_dir.glob("*.jsonl"))
        if size != self._journal_bytes:
            self._journal_bytes = size
            entries = read_journal(self.paths).entries
            own = [entry for entry in entries if entry.launch in (None, self.launch)]
            self._breaches += [entry for entry in own if is_breach(entry) and entry.id not in self._seen_breaches]
            self._seen_breaches |= {entry.id for entry in self._breaches}

    def _begin(self, first_step: int) -> None:
        """Fold the points that the launch continues; its first point tells where it starts."""
        self._begun = True
        contract = read_contract(self.paths.contract_path)
        self._promise = promise_of(contract, first_step)
        entries = read_journal(self.paths).entries
        kept = kept_before(self.paths, entries, self.launch)
        verdict = next((e for e in reversed(entries) if e.kind == EntryKind.GUARD_VERDICT and e.launch == self.launch), None)
        resumed, origin = (verdict.step, "guard") if verdict is not None else (self._handed(entries, first_step), "handed over")
        before = last_rows(self.paths, kept, resumed if resumed is not None else first_step - 1)
        self._restart.begin(
            RestartCheck(
                before=before,
                head=max((interval.last for interval in kept), default=0),
                first_step=first_step,
                told=resumed,
                origin="log" if resumed is None else origin,
                lr_ratio=lr_ratio_of(contract, first_step, before),
                warm_until=warm_until(contract, first_step),
                exact=compared_exactly(verdict),
            )
        )
        for launch, point in read_past(self.paths, kept, first_step):
            self.detector.feed(point.step, point.values, time=point.time, launch=launch)
        self._incidents.ignore(self.detector.events)

    def _handed(self, entries: Sequence[Entry], first_step: int) -> int | None:
        """The step of the checkpoint that this launch was told to resume from, where its first point is behind it.

        The launch before may have reached it without a word: printed steps that were still held were lost with its supervisor.
        """
        starts = (start for entry, start in events_of(entries, LaunchStart) if entry.launch == self.launch)
        step = next((start.handed.get("step") for start in starts), None)
        return step if isinstance(step, int) and step < first_step else None

    def _report(self, events: list[Event]) -> list[Event]:
        """Write what is new to the journal, call the hooks, propose or warn; returns the events of this launch."""
        kept: dict[int, Event] = {}
        for event in events:
            if self._incidents.is_old(event):
                continue
            kept[event.id] = event
            change = self._incidents.record(event)
            if not change:
                continue
            self._hooks.call(event)
            if event.tier is not Tier.NOTICE or change == "opened":
                self._say(f"chronicle: {self._incidents.title(event)}")
            if event.tier is Tier.PROPOSE:
                self._propose(event)
        return list(kept.values())

    def _propose(self, event: Event, events: Sequence[Event] | None = None) -> None:
        """Say what the rollback is; the guard has named its own events (those among `events`) itself."""
        advice = self._adviser.advise(self.detector.events if events is None else events, event)
        if advice is not None:
            self._say(f"chronicle: {advice}")

    def _complain(self, problem: Exception, *, what: str = "the live detector") -> None:
        text = f"{what} failed; training continues: {type(problem).__name__}: {problem}"
        if text not in self._complained:
            self._complained.add(text)
            self._say(f"chronicle: {text}")


# --- Events as journal entries


class IncidentLog:
    """Writes `incident` entries; later entries of an event refer to its first."""

    def __init__(self, writer: JournalWriter, launch: int | None, before: Iterable[Entry] = ()) -> None:
        """`before`: entries of this launch by a watch that has died."""
        self._writer, self._launch = writer, launch
        self._before: dict[tuple[int, tuple[str, str, str]], str] = {}  # number and state of an event -> its entry
        for entry, told in events_of(before, Incident):
            if told.id is not None:
                self._before.setdefault((told.id, (told.kind, told.tier, told.status)), entry.id)
        self._written: dict[int, tuple[str, tuple[str, str, str]]] = {}
        self._old: frozenset[int] = frozenset()

    def ignore(self, events: Iterable[Event]) -> None:
        """Ignore these events: they belong to earlier launches, whose watches have recorded them."""
        self._old = frozenset(event.id for event in events)

    def is_old(self, event: Event) -> bool:
        """Whether an event belongs to an earlier launch."""
        return event.id in self._old

    def record(self, event: Event) -> str:
        """Append an entry when kind, tier or status is new; returns what changed, nothing where nothing did."""
        state = (event.kind.value, event.tier.value, event.status.value)
        known = self._written.get(event.id)
        if known is not None and known[1] == state:
            return ""
        recorded = self._before.pop((event.id, state), None)
        if recorded is not None:
            self._written[event.id] = (recorded if known is None else known[0], state)
            return ""
        change = "opened" if known is None else "closed" if event.status is Status.RECOVERED else "changed"
        entry = self._writer.write(
            Incident.from_json(event.to_json() | {"change": change}), step=event.onset_step, launch=self._launch,
            title=self.title(event), refs=() if known is None else (known[0],),
        )  # fmt: skip
        self._written[event.id] = (entry.id if known is None else known[0], state)
        return change

    @staticmethod
    def title(event: Event) -> str:
        """Return one line for journal and terminal."""
        where = ", ".join(event.channels) or "log"
        since = f"since step {event.onset_step}"
        if event.onset_low_step is not None and event.onset_low_step != event.onset_step:
            since += f" (at the earliest {event.onset_low_step})"
        state = f", {event.status.value}" if event.status is not Status.OPEN else ""
        detail = f": {event.evidence[0]}" if event.evidence else ""
        loud = "" if event.tier is Tier.NOTICE else f"{event.tier.value}: "
        return f"{loud}{event.kind.value} on {where} {since}{state}{detail}"


# --- Hooks: the user's commands, one per tier

# A hook gets the event as JSON on standard input and in CHRONICLE_EVENT, its main fields in CHRONICLE_EVENT_KIND, _TIER,
# _STATUS, _ONSET and _CHANNELS. Its output goes to standard error. The watch does not wait for it.

AT_ONCE = 8  # hooks that may run at the same time
WAIT_SECONDS = 10.0  # at the end of a watch


class Hooks:
    """`call` starts the command of the event's tier, once for each tier that an event reaches."""

    def __init__(self, commands: Mapping[str, str], say: Callable[[str], None]) -> None:
        self._commands, self._say = commands, say
        self._called: set[tuple[int, str]] = set()
        self._running: list[tuple[str, subprocess.Popen[bytes]]] = []

    def call(self, event: Event) -> None:
        """Start the hook of the event's tier; a hook that cannot start is reported, not raised."""
        name = f"on_{event.tier.value}"
        command, key = self._commands.get(name), (event.id, event.tier.value)
        self.reap()
        if not command or key in self._called:
            return
        self._called.add(key)
        if len(self._running) >= AT_ONCE:
            self._say(f"hook {name} is not started: {AT_ONCE} hooks still run")
            return
        record = json.dumps(event.to_json())
        facts = {
            "": record, "_KIND": event.kind.value, "_TIER": event.tier.value, "_ONSET": str(event.onset_step),
            "_CHANNELS": ",".join(event.channels), "_STATUS": event.status.value,
        }  # fmt: skip
        environ = os.environ | {f"CHRONICLE_EVENT{field}": text for field, text in facts.items()}
        try:
            # The command is a shell line of the user's own settings or flags.
            process = subprocess.Popen(  # noqa: S602
                command, shell=True, env=environ, stdin=subprocess.PIPE, stdout=2, start_new_session=True
            )
        except OSError as problem:
            self._say(f"hook {name} cannot be started: {problem}")
            return
        self._running.append((name, process))
        assert process.stdin is not None
        with suppress(OSError), process.stdin:  # the command may end without reading
            process.stdin.write(record.encode() + b"\n")

    def reap(self) -> None:
        """Report the hooks that have ended with an error."""
        for name, process in [item for item in self._running if item[1].poll() is not None]:
            self._running.remove((name, process))
            if process.returncode:
                self._say(f"hook {name} ended with code {process.returncode}")

    def finish(self, seconds: float = WAIT_SECONDS) -> None:
        """Wait for the hooks that still run; report those that do not end, without killing them."""
        until = time.monotonic() + seconds
        while self._running and time.monotonic() < until:
            self.reap()
            time.sleep(0.02)
        for name, process in self._running:
            self._say(f"hook {name} still runs as process {process.pid}")

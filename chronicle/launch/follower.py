"""The second process of a launch: it reads what the supervisor writes, so that the supervisor never has to.

    supervisor.log ─ lines ─ live_metrics ─> metrics.jsonl ─ watch.live ─> incidents, proposals, hooks
    pulses, /proc ─ stall ─> where the ranks stand            /proc, nvidia-smi ─ devices ─> evidence

It is a child of the supervisor (`second`), which starts it with facts on its stdin, starts it again where it stood when it
dies, and ends its stdin when the launch is over. What it wants said, remembered or done it writes to its stdout, a JSON object
a line: `say`, `stop`, `words`, `progress`, `rhythm`, `printed`, `done`. Signals are the supervisor's: none but KILL ends it.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from chronicle.journal import Entry, JournalWriter, read_journal
from chronicle.journal.events import EntryKind, LaunchStep
from chronicle.launch.attempts import Attempts
from chronicle.launch.devices import DeviceSampler
from chronicle.launch.heartbeat import FRESH_SECONDS, read_heartbeats
from chronicle.launch.live_metrics import Place, PrintedMetrics, last_point, read_start_step
from chronicle.launch.output import LineTail
from chronicle.launch.processes import Process, walk_children
from chronicle.launch.ranks import ranks_among
from chronicle.launch.record import LaunchRecord, LaunchSeals, contained
from chronicle.launch.stall import StallWatch
from chronicle.launch.supervisor import FORWARDED, TAKEN_AS_TERM
from chronicle.paths import RunPaths
from rollback.disk.durable import write_atomic

if TYPE_CHECKING:
    from chronicle.watch import LiveWatch

T = TypeVar("T")
STATE_NAME = ".follower.json"  # where another one goes on
NICE = 5
LINES_BYTES = 1 << 18  # read at once
LOOK_SECONDS = 1.0
TELL_SECONDS = 10.0  # between two words about progress
ALONE_SECONDS = 120  # for the rest of the log, after a supervisor that was killed
WATCH_SECONDS = 5.0  # before the detector is loaded for a launch that logs nothing
SOON_SECONDS = 0.2
OURS = b"chronicle: "
OF_RANK = re.compile(rb"\[(\d+)\] ")


class Follower:
    """Follows one launch on one machine. `facts`: what `launching` knows of it; `tell` hands words to the supervisor."""

    def __init__(self, facts: Mapping[str, Any], tell: Callable[[Mapping[str, Any]], None]) -> None:
        self._facts, self._tell = facts, tell
        self._paths = RunPaths(Path(facts["run_dir"]))
        self._number: int = facts["launch"]
        self._directory = self._paths.launch_dir(self._number)
        self._metrics = self._paths.metrics_path(self._number)
        self._pulses = Path(facts["pulses"]) if facts["pulses"] else None
        self._began = time.monotonic()
        self._said: set[str] = set()
        self._output = 0  # bytes that the launch printed
        self._tail = LineTail(self._directory / facts["log"])
        self._writer = JournalWriter(self._paths, checkpoints=_path(facts["checkpoints"]))
        self._record = LaunchRecord(self._writer, self._number, complain=self._complain)
        self._seals = LaunchSeals(self._paths, self._number, self._record)
        self._before: Sequence[Entry] = ()
        if facts["again"]:
            self._before = [entry for entry in read_journal(self._paths).entries if entry.launch == self._number]
        self._attempts = Attempts(
            self._pulses,
            host=facts["host"],
            launch=self._number,
            write=self._record.write,
            say=self._say,
            oom_kills=facts["oom_kills"],
            before=self._before,
        )
        self._printed = PrintedMetrics(self._metrics, say=self._say, newer_attempt=self._attempts.newer)
        self._devices = DeviceSampler(self._directory, host=facts["host"], step=self._last_step)
        self._stall = StallWatch(
            pulses=self._pulses,
            tree=self._tree,
            rank_pids=lambda: ranks_among(self._tree()),
            signs=self._signs,
            step=self._last_step,
            say=self._say,
            write=self._record.write,
            directory=self._directory,
            host=facts["host"],
            launch=self._number,
            known=facts["rhythm"],
            others_work=self._others_work,
            devices=lambda: self._devices.busy,
        )
        self._watch: LiveWatch | None = None
        self._start_step: int | None = None
        self._asked = False
        self._told_at = float("-inf")
        self._told_state = ""
        self._state: Mapping[str, Any] = {}
        if facts["again"]:
            self._go_on()

    def _go_on(self) -> None:
        """Go on from what another one wrote."""
        try:
            state = json.loads((self._directory / STATE_NAME).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return  # it had not come that far
        place = self._printed.go_on(state)
        self._tail = LineTail(self._tail.path, part=place.part, offset=place.offset)

    # ---- the loop

    def run(self) -> None:
        """Follow the launch until the supervisor's word ends; then to the end of the log."""
        over = select.poll()
        over.register(0, select.POLLIN)
        next_look, is_over = 0.0, False
        while True:
            if not is_over and over.poll(0):
                is_over = not os.read(0, 1 << 12)
                signal.alarm(ALONE_SECONDS)  # the supervisor ends this process sooner, where it lives
            more = self._read_lines()
            if is_over and not more:
                break
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + LOOK_SECONDS
                self._look()
            if not more:
                over.poll(SOON_SECONDS * 1000)
        self._finish()

    def _read_lines(self) -> bool:
        """Read some lines of the log; whether there were any."""
        lines = self._tail.read(LINES_BYTES)
        self._take(lines)
        return bool(lines)

    def _take(self, lines: Iterable[bytes]) -> None:
        trainers = self._of_trainer(lines)
        self._output += sum(map(len, trainers))
        self._attempts.take(trainers)
        if self._facts["is_first"]:
            self._printed.take(trainers, Place(self._tail.part, self._tail.offset))

    def _of_trainer(self, lines: Iterable[bytes]) -> list[bytes]:
        """What the launcher and the first rank printed: no line of ours, none of other ranks that have logs of their own."""
        found = []
        for line in lines:
            named = OF_RANK.match(line) if line[:1] == b"[" else None
            if named is not None and self._paths.rank_log(self._number, int(named[1])).exists():
                if int(named[1]) == 0:
                    found.append(line[named.end() :])
            elif not line.startswith(OURS):
                found.append(line)
        return found

    def _look(self) -> None:
        """Once a second: what has been written, the detector, signs of progress, devices."""
        self._printed.write_due()
        self._keep_state()
        self._contained("attempts", lambda: self._attempts.note(time.monotonic()))
        self._contained("devices", lambda: self._devices.look(time.monotonic()))
        self._contained("parts of logs", self._seals.seal_parts)
        if self._facts["is_first"]:
            self._contained("the start step", self._note_start_step)
            self._contained("the detector", self._detect)
        stands = self._contained("signs of progress", self._stall.tick)
        if stands and self._facts["stop_on_stall"]:
            self._ask("stall", self._stall.words)
        self._tell_progress()
        if self._record.waiting:
            self._record.flush()

    def _finish(self) -> None:
        """The launch is over and its log has been read."""
        self._take([rest] if (rest := self._tail.rest()) else [])
        self._printed.finish()
        if self._facts["is_first"]:
            self._contained("the start step", self._note_start_step)
            self._contained("the detector", lambda: self._detect(is_last=True))
        self._contained("attempts", lambda: self._attempts.note(time.monotonic(), is_last=True))
        self._contained("devices", self._devices.finish)
        self._contained("parts of logs", self._seals.seal_parts)
        self._tell({**self._words_of_progress(), "printed": self._printed.writing, "done": True})
        self._writer.close()
        (self._directory / STATE_NAME).unlink(missing_ok=True)

    # ---- what is found

    def _detect(self, *, is_last: bool = False) -> None:
        """Ask the live detector; it is loaded once there is something to read."""
        if self._watch is None:
            if not self._metrics.exists() and time.monotonic() - self._began < WATCH_SECONDS:
                return
            self._watch = self._load_watch()
        events = self._watch.finish() if is_last else self._watch.poll()
        if not self._facts["stop_on_proposal"]:
            return
        for event in events:
            if event.tier.value == "propose":
                self._ask("proposal", event.kind.value)

    def _load_watch(self) -> LiveWatch:
        from chronicle.watch import LiveWatch  # a third of a second on a busy machine

        return LiveWatch(
            self._paths,
            self._number,
            self._writer,
            checkpoints_dir=_path(self._facts["checkpoints"]),
            say=lambda line: self._say(line.removeprefix("chronicle: ")),
            hooks=self._facts["hooks"],
            options=tuple(self._facts["options"]),
            before=self._before,
        )

    def _note_start_step(self) -> None:
        """Record the start step from the per-step log, for trainers without a guard."""
        if self._start_step is not None:
            return
        self._start_step = read_start_step(self._metrics)
        if self._start_step is None or any(entry.kind == EntryKind.LAUNCH_STEP for entry in self._before):
            return
        verdicts = read_journal(self._paths).of_kind(EntryKind.GUARD_VERDICT)
        if not any(entry.launch == self._number for entry in verdicts):  # the guard's is exact, and not contradicted
            self._record.write(LaunchStep(start_step=self._start_step, inferred=True), step=self._start_step)

    def _signs(self) -> tuple[int, int, int]:
        """Signs of progress: printed points, bytes of the metrics, bytes of output."""
        size = 0
        if not self._printed.writing and self._metrics.exists():  # what we write ourselves is late and no sign
            size = self._metrics.stat().st_size
        return self._printed.seen, size, self._output

    def _tree(self) -> list[Process]:
        """The processes of the launch, without this one."""
        return walk_children(self._facts["supervisor"], apart=os.getpid())

    def _others_work(self) -> str:
        """Of several nodes: one whose ranks work, or are not known to stand still, by its heartbeat; "" where none does."""
        if not self._facts["has_peers"]:
            return ""
        now = time.time()
        for beat in read_heartbeats(self._paths.heartbeats_dir):
            if beat.launch != self._number or beat.host == self._facts["host"] or beat.age(now) >= FRESH_SECONDS:
                continue
            state = (beat.progress or {}).get("state")
            if state not in ("stands here", "stands"):
                return f"node {beat.host}: {state or 'not known'}"
        return ""

    def _last_step(self) -> int | None:
        point = last_point(self._metrics)
        return None if point is None else point.step

    # ---- what is told

    def _tell_progress(self) -> None:
        now = time.monotonic()
        if self._stall.state != self._told_state or now - self._told_at >= TELL_SECONDS:
            self._told_state, self._told_at = self._stall.state, now
            self._tell(self._words_of_progress())

    def _words_of_progress(self) -> dict[str, Any]:
        return {
            "progress": self._stall.progress(time.time()),
            "rhythm": self._stall.rhythm(),
            "oom_kills": self._attempts.oom_kills,
        }

    def _ask(self, reason: str, words: str) -> None:
        """Ask the supervisor to end the launch."""
        if not self._asked:
            self._asked = True
            self._tell({"words": words, "stop": reason})

    def _say(self, text: str) -> None:
        self._tell({"say": text})

    def _complain(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._say(text)

    def _keep_state(self) -> None:
        """Write where another one would go on, when it has changed."""
        state = self._printed.state()
        if state == self._state or not self._facts["is_first"]:
            return
        try:
            write_atomic(self._directory / STATE_NAME, json.dumps(state), durable=False)
            self._state = state
        except OSError:
            pass  # another one would read the log from its beginning

    def _contained(self, what: str, work: Callable[[], T]) -> T | None:
        return contained(self._complain, what, work)


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


def _tell(words: Mapping[str, Any]) -> None:
    """To the supervisor; one that has been killed hears nothing."""
    try:
        os.write(1, json.dumps(words).encode() + b"\n")
    except OSError:
        pass


def _read_facts() -> dict[str, Any]:
    """The first line of stdin."""
    data = b""
    while not data.endswith(b"\n"):
        block = os.read(0, 1 << 16)
        if not block:
            sys.exit(0)  # the supervisor ended meanwhile
        data += block
    facts: dict[str, Any] = json.loads(data)
    return facts


def main() -> None:
    """Follow the launch that the facts on stdin name."""
    for number in (*FORWARDED, *TAKEN_AS_TERM):
        signal.signal(number, lambda *_: None)
    os.nice(NICE)
    facts = _read_facts()
    Follower(facts, _tell).run()


if __name__ == "__main__":
    main()

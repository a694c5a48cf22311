"""One launch of a rehearsal: `chronicle run` in a scratch directory, looked at from outside until it may end.

The launch is the user's own command with `{out}`, `{name}` and `{port}` filled in. Its journal, logs, metrics and prints are in
the scratch directory too, and no tracker is told.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from chronicle.errors import ChronicleError
from chronicle.journal import read_journal
from chronicle.journal.events import GuardVerdict, LaunchEnd, LaunchStart, events_of
from chronicle.launch.admission import LiveProcess, ProcessRole, find_alive, list_launches
from chronicle.launch.live_metrics import last_point
from chronicle.launch.processes import read_variable, send_signal
from chronicle.launch.scratch import copy_tree, free_port, silent
from chronicle.metrics.lines import PrintedLines
from chronicle.metrics.log import Point, read_metrics
from chronicle.paths import RunPaths, list_launch_numbers
from chronicle.prints.ring import Print, rings_of
from chronicle.resume.rehearsal import REHEARSAL_VARIABLE, Asked, asked_of
from rollback.checkpoint.account import may_be_state
from rollback.checkpoint.below import checkpoints_below, saved_in
from rollback.checkpoint.layout import Checkpoint

LOOK_SECONDS = 0.2
MOST_SECONDS = 120.0  # for a launch to end by itself, or after the signal that is rehearsed
LINES_A_SAVE = 100  # of a launch that prints no steps; so many times the steps, and it is ended without a save
STILL_LOOKS = 4  # so many looks in a row at the same files: the save is over
NAME_OUT = "put {out} where the command names its output directory, as in `--output_dir {out}`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a launch writes: `out` is what `{out}` stands for, or a copy of the working directory in which it runs."""

    name: str
    scratch: Path
    is_copy: bool = False

    @property
    def out(self) -> Path:
        """The directory for `{out}`, or the copy."""
        return self.scratch / self.name / ("copy" if self.is_copy else "out")

    @property
    def cwd(self) -> Path:
        """Where the launch runs."""
        return self.out if self.is_copy else Path.cwd()

    def prepare(self) -> None:
        """Make the directory, or the copy, in which no checkpoint is. Raises `UsageProblem` where it would be too large."""
        if not self.is_copy:
            self.out.mkdir(parents=True, exist_ok=True)
        elif not self.out.exists():
            copy_tree(Path.cwd(), self.out, {self.scratch}, remedy=NAME_OUT)
            for one in checkpoints_below(self.out):
                if one.path.is_dir():
                    if one.files:  # else it is known by its name alone
                        shutil.rmtree(one.path)
                elif may_be_state(one.path):  # a source file may have one number in its name, too
                    one.path.unlink()

    @property
    def paths(self) -> RunPaths:
        """The run in the scratch directory that records it."""
        return RunPaths(self.scratch / self.name / "logs" / self.name)

    def fill(self, words: Sequence[str], checkpoint: Path | None = None) -> tuple[str, ...]:
        """The command with its places filled in."""
        values = {"{out}": str(self.out), "{name}": self.name, "{port}": str(free_port())}
        if checkpoint is not None:
            values["{checkpoint}"] = str(checkpoint)
        for name, value in values.items():
            words = [word.replace(name, value) for word in words]
        return tuple(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What a launch left."""

    out: Path
    listed: tuple[Checkpoint, ...]  # what it saved
    points: tuple[Point, ...]
    prints: Mapping[int, Mapping[int, Print]]  # by rank, by step
    start: LaunchStart
    guard: tuple[GuardVerdict, ...]
    end: str  # why it ended, in words
    exit_code: int = 0
    own_code: int = 0  # of the command itself, negative: the signal that ended it
    seconds: float = 0.0
    ranks: int = 1  # as the launcher told its processes, or as many as were printed
    ended_in: float | None = None  # seconds from our signal to the end
    stepped_for: float | None = None  # seconds from our signal to the last step, where the log has its time
    saved_before: frozenset[int] = frozenset()  # steps of the checkpoints that were there when we sent it
    told_at: int = 0  # the step that was known then
    last_words: str = ""  # what it printed last, where it failed

    @property
    def printed(self) -> list[int]:
        """The steps of which a guard left prints."""
        return [step for ring in self.prints.values() for step in ring]

    @property
    def last_step(self) -> int:
        """The last step that was logged or printed; 0: none."""
        return max([point.step for point in self.points] + self.printed, default=0)

    @property
    def saves(self) -> dict[int, Checkpoint]:
        """What it saved, by step; what has none is left out."""
        return {one.step: one for one in self.listed if one.step is not None}

    @property
    def reached(self) -> int:
        """The last step that it is known to have taken: logged, printed, or of a checkpoint."""
        return max(self.last_step, *self.saves, 0)

    @property
    def first_step(self) -> int | None:
        """The first step that was logged; without a log as the guard counts, which goes by the optimizer."""
        logged = [point.step for point in self.points if point.values]
        return min(logged or self.printed, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Until:
    """When a launch is ended, and by what: after a step, or once a checkpoint of step `saved` or a later one is whole."""

    step: int
    saved: int = sys.maxsize
    signal: signal.Signals = signal.SIGKILL  # to every rank, as when a node is gone; another one as a scheduler sends it
    is_over: Callable[[], bool] = bool


def play(
    place: Place,
    words: Sequence[str],
    environ: Mapping[str, str],
    until: Until,
    *,
    before: Sequence[str] = (),
    options: Sequence[str] = (),
) -> Played:
    """Launch a command in its place, end it in time, and read what it left. Nothing of it outlives this call.

    `before`: a program that becomes the one that its last words name. `options` of `chronicle run`.
    """
    place.prepare()
    seen = _Seen(place, asked_of(environ).end or until.step)
    ours = ["run", *options, "--run", place.name, "--logs", str(place.paths.run_dir.parent), "--checkpoints", str(place.out)]
    began, told = time.monotonic(), None
    ranks, told_at, told_time = 1, 0, 0.0
    saved_before: frozenset[int] = frozenset()
    with seen.output.open("wb") as log:
        process = subprocess.Popen(
            [*before, sys.executable, "-m", "chronicle_ml", *ours, "--", *words], cwd=place.cwd, stdin=subprocess.DEVNULL,
            stdout=log, stderr=subprocess.STDOUT, env={**environ, **silent(place.scratch / place.name)}, start_new_session=True,
        )  # fmt: skip
    try:
        while told is None and process.poll() is None:
            time.sleep(LOOK_SECONDS)
            if ranks == 1:
                ranks = max(_world_sizes(place))
            is_saved = seen.newest_save() >= until.saved
            told_at = seen.step()
            if until.is_over() or is_saved or told_at >= until.step:
                saved_before, told = frozenset(saved_in(place.out)), time.monotonic()
                told_time = time.time()
                _end(place, process, until.signal)
        process.wait(timeout=MOST_SECONDS)
    except subprocess.TimeoutExpired:
        pass  # it is ended now
    finally:
        if process.poll() is None:
            _end(place, process, signal.SIGKILL)
            process.terminate()
            process.wait()
    if seen.launch not in list_launch_numbers(place.paths):
        raise ChronicleError(f"launch `{place.name}` did not start: {seen.last_lines()}")
    played = read_played(place.paths, place.out, seen.launch, ranks)
    if not seen.is_counting_steps:
        played = replace(played, points=())
    now, last = time.monotonic(), ""
    times = [point.time for point in played.points if point.time is not None]
    if process.returncode > 0 and played.end:
        last = ": " + seen.last_lines().rpartition(" / ")[2].removeprefix("chronicle:").strip()
    return replace(
        played, last_words=last, end=played.end or seen.last_lines(), exit_code=process.returncode, seconds=now - began,
        ended_in=None if told is None else now - told, saved_before=saved_before, told_at=told_at,
        stepped_for=max(times) - told_time if times else None,
    )  # fmt: skip


def _end(place: Place, process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    if number is not signal.SIGKILL:
        process.send_signal(number)
        return
    for one in _alive(place):
        if one.role is not ProcessRole.SUPERVISOR:
            send_signal(one.process, number)


def _alive(place: Place) -> list[LiveProcess]:
    return find_alive(place.paths, list_launches(read_journal(place.paths).entries))


def _world_sizes(place: Place) -> list[int]:
    told = [read_variable(one.process.pid, "WORLD_SIZE") for one in _alive(place)]
    return [1, *(int(text) for text in told if text is not None and text.isdecimal())]


class _Seen:
    """What is seen of a launch while it lives. Numbers that begin beyond the last step count samples or tokens."""

    def __init__(self, place: Place, last_step: int) -> None:
        self._place, self._last_step = place, last_step
        self._files: list[object] = []
        self.launch = max(list_launch_numbers(place.paths), default=0) + 1
        self.output = place.scratch / place.name / f"output-{self.launch}.log"
        self._read_to = 0
        self._lines = PrintedLines()
        self._numbers: set[int] = set()  # that were logged or printed
        self._newest = 0  # step of the newest checkpoint

    @property
    def is_counting_steps(self) -> bool:
        """Whether the numbers are steps; where they are not, the saves alone tell how far it is."""
        return min(self._numbers, default=0) <= self._last_step

    def step(self) -> int:
        """The newest step that was logged or printed, as a log keeps lines back; without steps the newest save. 0: none."""
        with self.output.open("rb") as log:
            log.seek(self._read_to)
            *lines, rest = log.read().split(b"\n")
            self._read_to = log.tell() - len(rest)
        points = [self._lines.parse(line.decode(errors="replace") + "\n") for line in lines]
        points.append(last_point(self._place.paths.metrics_path(self.launch)))
        self._numbers |= {point.step for point in points if point is not None}
        if self.is_counting_steps:
            return max(self._numbers, default=0)
        return max(self._newest, len(self._numbers) // LINES_A_SAVE)

    def newest_save(self) -> int:
        """The step of the newest checkpoint, read where nothing has changed for some looks. 0: none."""
        try:
            files = sorted(path for path in self._place.out.rglob("*") if path.is_file())
            now = [(path, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        except OSError:
            return self._newest  # it was moved meanwhile
        self._files = [*self._files, now][-STILL_LOOKS - 1 :]
        if self._files.count(now) == STILL_LOOKS:  # as long as nothing changes it is not read again
            self._newest = max(saved_in(self._place.out), default=0)
        return self._newest

    def last_lines(self) -> str:
        """What it printed last."""
        lines = self.output.read_text(errors="replace").strip().splitlines()
        return " / ".join(lines[-3:]) or "it printed nothing"


def read_played(paths: RunPaths, out: Path, launch: int, ranks: int = 1) -> Played:
    """What a launch of a run left in its directory `out`. `ranks`: as many as were seen."""
    entries = [entry for entry in read_journal(paths).entries if entry.launch == launch]
    ends = [end for _, end in events_of(entries, LaunchEnd)]
    path = paths.metrics_path(launch)
    prints = {rank: ring.steps() for rank, ring in rings_of(paths.launch_dir(launch)).items()}
    return Played(
        out=out,
        listed=tuple(checkpoints_below(out)),
        points=tuple(read_metrics(path)) if path.is_file() else (),
        prints=prints,
        start=next((start for _, start in events_of(entries, LaunchStart)), LaunchStart()),
        guard=tuple(event for _, event in events_of(entries, GuardVerdict)),
        end=(ends[-1].because or str(ends[-1].cause)) if ends else "",
        own_code=(ends[-1].launcher_code or 0) if ends else 0,
        ranks=max(ranks, len(prints)),
    )


def environment_of(asked: Asked, handed: Mapping[str, str]) -> dict[str, str]:
    """The variables of a rehearsed launch."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("CHRONICLE_")}
    environ |= {"CHRONICLE_PRINTS": "every", "CHRONICLE_GUARD": "warn", "PYTHONHASHSEED": "0"}
    return environ | {REHEARSAL_VARIABLE: asked.text(), **handed}

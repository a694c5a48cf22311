"""One launch of a rehearsal: `chronicle run` in a scratch directory, looked at from outside until it may end.

The launch is the user's own command with `{out}`, `{name}` and `{port}` filled in. Its journal, logs, metrics and prints are in
the scratch directory too, and no tracker is told.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from chronicle.errors import ChronicleError, UsageProblem
from chronicle.journal import read_journal
from chronicle.journal.events import LaunchEnd, events_of
from chronicle.launch.admission import LiveProcess, ProcessRole, find_alive, list_launches
from chronicle.launch.live_metrics import last_point
from chronicle.launch.processes import read_variable, send_signal
from chronicle.metrics.lines import PrintedLines
from chronicle.metrics.log import Point, read_metrics
from chronicle.paths import RunPaths, list_launch_numbers
from chronicle.replay.fork import NO_TRACKERS
from chronicle.resume.rehearsal import REHEARSAL_VARIABLE, Asked
from chronicle.resume.ring import Print, rings_of
from rollback.checkpoint.layout import Checkpoint
from rollback.checkpoint.listing import list_checkpoints
from rollback.errors import RollbackError

LOOK_SECONDS = 0.2
STILL_LOOKS = 4  # so many looks in a row at the same files: the save is over
MOST_LEVELS = 3  # below `{out}`, as Lightning's `lightning_logs/version_0/checkpoints`
MOST_COPIED_BYTES = 256 << 20
LEFT_OUT = (".git", ".venv", "venv", "__pycache__", "node_modules", "logs", "wandb", "mlruns")


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
            _copy(Path.cwd(), self.out, self.scratch)
            for one in checkpoints_below(self.out):
                shutil.rmtree(one.path) if one.path.is_dir() else one.path.unlink()

    @property
    def paths(self) -> RunPaths:
        """The run in the scratch directory that records it."""
        return RunPaths(self.scratch / self.name / "logs" / self.name)

    def fill(self, words: Sequence[str], checkpoint: Path | None = None) -> tuple[str, ...]:
        """The command with its places filled in."""
        values = {"{out}": str(self.out), "{name}": self.name, "{port}": str(_free_port())}
        if checkpoint is not None:
            values["{checkpoint}"] = str(checkpoint)
        return tuple(_filled(word, values) for word in words)

    def stands_for(self) -> dict[str, str]:
        """What is put for the paths of this launch where they stand in files."""
        return {str(self.out): "{out}", str(self.scratch / self.name): "{scratch}"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What a launch left."""

    launch: int
    exit_code: int
    seconds: float
    points: tuple[Point, ...]
    prints: Mapping[int, Mapping[int, Print]]  # by rank, by step
    end: str  # why it ended, in words
    ranks: int = 1  # as the launcher told its processes, or as many as were printed
    ended_in: float | None = None  # seconds from our signal to the end
    saved_before: frozenset[int] = frozenset()  # steps of the checkpoints that were there when we sent it

    @property
    def last_step(self) -> int | None:
        """The last step that was logged or printed."""
        steps = [point.step for point in self.points]
        steps += [step for ring in self.prints.values() for step in ring]
        return max(steps, default=None)

    @property
    def first_step(self) -> int | None:
        """The first step that was logged; without a log as the guard counts, which goes by the optimizer."""
        logged = [point.step for point in self.points if point.values]
        printed = [step for ring in self.prints.values() for step in ring]
        return min(logged or printed, default=None)


class Running:
    """A launch that goes on."""

    def __init__(self, place: Place, words: Sequence[str], asked: Asked, handed: Mapping[str, str]) -> None:
        self.place = place
        self._began = time.monotonic()
        self._told: float | None = None
        self._saved: frozenset[int] = frozenset()
        self._seen: list[object] = []
        self._earlier = set(list_launch_numbers(place.paths))
        place.prepare()
        ours = ["run", "--run", place.name, "--logs", str(place.paths.run_dir.parent), "--checkpoints", str(place.out)]
        command = [sys.executable, "-m", "chronicle_ml", *ours, "--", *words]
        self._output = place.scratch / place.name / "output.log"
        self._read_to = self._output.stat().st_size if self._output.exists() else 0
        self._lines, self._printed = PrintedLines(), 0
        self._ranks = 1
        with self._output.open("ab") as log:
            self._process = subprocess.Popen(
                command, cwd=place.cwd, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                env=_environment(place, asked, handed), start_new_session=True,
            )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Whatever happened here: nothing of the launch outlives the rehearsal."""
        if self._process.poll() is None:
            self.kill_ranks()
            self._process.terminate()
            self._process.wait()

    def looks(self) -> Iterator[int]:
        """The newest logged step (0: none yet), again and again while the launch lives."""
        while self._process.poll() is None:
            time.sleep(LOOK_SECONDS)
            step = self._step()
            if step == 0 or self._ranks == 1:
                self._ranks = max(self._ranks, *self._world_sizes())
            yield step

    def _world_sizes(self) -> list[int]:
        told = [read_variable(one.process.pid, "WORLD_SIZE") for one in self._alive()]
        return [1, *(int(text) for text in told if text is not None and text.isdecimal())]

    def is_still(self) -> bool:
        """Whether nothing in `out` has changed for some looks."""
        now = sorted((str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in _files_below(self.place.out))
        self._seen = [*self._seen, now][-STILL_LOOKS:]
        return len(self._seen) == STILL_LOOKS and all(one == now for one in self._seen)

    def kill_ranks(self) -> None:
        """SIGKILL to every process of the launch but its supervisor, as when a node's memory is gone."""
        self._told = self._told or time.monotonic()
        for one in self._alive():
            if one.role is not ProcessRole.SUPERVISOR:
                send_signal(one.process, signal.SIGKILL)

    def tell(self, number: signal.Signals) -> None:
        """A signal to the supervisor, as a scheduler sends it."""
        self._saved = frozenset(saved_in(self.place.out))
        self._told = time.monotonic()
        self._process.send_signal(number)

    def wait(self, seconds: float) -> Played:
        """Wait for the end and read what was left; ends it after `seconds`."""
        try:
            self._process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.kill_ranks()
            self._process.wait()
        ended_in = None if self._told is None else time.monotonic() - self._told
        own = set(list_launch_numbers(self.place.paths)) - self._earlier
        if not own:
            raise ChronicleError(f"launch `{self.place.name}` did not start: {self._last_lines()}")
        played = read_played(self.place, max(own), ranks=self._ranks)
        end = played.end or self._last_lines()
        seconds = time.monotonic() - self._began
        code = self._process.returncode
        return replace(played, end=end, exit_code=code, seconds=seconds, ended_in=ended_in, saved_before=self._saved)

    def _step(self) -> int:
        own = set(list_launch_numbers(self.place.paths)) - self._earlier
        if not own:
            return 0
        newest = last_point(self.place.paths.metrics_path(max(own)))
        return max(self._printed_step(), 0 if newest is None else newest.step)

    def _printed_step(self) -> int:
        """The last step in the lines that were printed: the log of the launch keeps them back for some seconds."""
        with self._output.open("rb") as log:
            log.seek(self._read_to)
            lines = log.read().split(b"\n")[:-1]
        self._read_to += sum(len(line) + 1 for line in lines)
        points = [self._lines.parse(line.decode(errors="replace") + "\n") for line in lines]
        self._printed = max((point.step for point in points if point is not None), default=self._printed)
        return self._printed

    def _alive(self) -> list[LiveProcess]:
        return find_alive(self.place.paths, list_launches(read_journal(self.place.paths).entries))

    def _last_lines(self) -> str:
        lines = self._output.read_text(errors="replace").strip().splitlines()
        return " / ".join(lines[-3:]) or "it printed nothing"


def read_played(place: Place, launch: int | None = None, *, ranks: int | None = None) -> Played:
    """What a launch left in its directory; the last launch there, where none is named."""
    paths = place.paths
    number = launch or max(list_launch_numbers(paths))
    noted = place.scratch / place.name / f"ranks-{number}"
    if ranks is None:
        ranks = int(noted.read_text())
    noted.write_text(str(ranks))
    ends = [end for entry, end in events_of(read_journal(paths).entries, LaunchEnd) if entry.launch == number]
    path = paths.metrics_path(number)
    prints = {rank: ring.steps() for rank, ring in rings_of(paths.launch_dir(number)).items()}
    return Played(
        launch=number,
        exit_code=0,
        seconds=0.0,
        points=tuple(read_metrics(path)) if path.is_file() else (),
        prints=prints,
        end=(ends[-1].because or str(ends[-1].cause)) if ends else "",
        ranks=max(ranks, len(prints)),
    )


def saved_in(out: Path) -> dict[int, Checkpoint]:
    """The checkpoints in a directory, and in those below it, by their step; those whose step is not known are left out."""
    return {one.step: one for one in checkpoints_below(out) if one.step is not None}


def checkpoints_below(out: Path) -> list[Checkpoint]:
    """Every checkpoint in a directory, and in those below it.

    Where no layout is known, what has exactly one number in its name, and a number that nothing else there has, is the save of
    that step: `rl_model_400_steps.zip`.
    """
    found: list[Checkpoint] = []
    named: dict[int, list[Path]] = defaultdict(list)
    for place, names, files in os.walk(out):
        folder = Path(place)
        listed = _listed(folder)
        found += listed
        others = [name for name in (*names, *files) if folder / name not in {one.path for one in listed}]
        is_deep = len(folder.relative_to(out).parts) >= MOST_LEVELS or folder in {one.path for one in listed}
        names[:] = [] if is_deep else [name for name in names if name in others and not name.startswith(".")]
        for name in others:
            numbers = re.findall(r"\d+", name)
            if len(numbers) == 1:
                named[int(numbers[0])].append(folder / name)
    if any(one.step is not None for one in found):
        return found
    alone = {step: paths[0] for step, paths in named.items() if len(paths) == 1}
    return [
        Checkpoint(path=path, step=step, step_source="name", format="unknown", files=(), single_file=path.is_file())
        for step, path in alone.items()
    ]


def _listed(folder: Path) -> list[Checkpoint]:
    try:
        return list_checkpoints(folder, include_abandoned=False)
    except RollbackError:
        return []


def _copy(source: Path, target: Path, scratch: Path) -> None:
    """The working directory without repositories, environments, caches and what the rehearsal itself writes."""

    def left_out(folder: str, names: Sequence[str]) -> set[str]:
        return {name for name in names if name in LEFT_OUT or Path(folder, name).resolve() == scratch}

    size = 0
    for folder, names, files in os.walk(source):
        skipped = left_out(folder, names)
        names[:] = [name for name in names if name not in skipped]
        size += sum((Path(folder) / name).lstat().st_size for name in files)
        if size > MOST_COPIED_BYTES:
            raise UsageProblem(
                f"no {{out}} in the command, and `{source}` is too large to be copied for each launch",
                "put {out} where the command names its output directory, as in `--output_dir {out}`",
            )
    shutil.copytree(source, target, symlinks=True, ignore=left_out)


def _environment(place: Place, asked: Asked, handed: Mapping[str, str]) -> dict[str, str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("CHRONICLE_")}
    scratch = place.scratch / place.name
    environ |= {name: value.format(sandbox=scratch) for name, value in NO_TRACKERS.items()}
    environ |= {"CHRONICLE_PRINTS": "every", "CHRONICLE_MLFLOW_URI": "off", "CHRONICLE_GUARD": "warn"}
    environ |= {"PYTHONHASHSEED": "0", **handed}
    if asked.text():
        environ[REHEARSAL_VARIABLE] = asked.text()
    return environ


def _filled(word: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        word = word.replace(name, value)
    return word


def _files_below(out: Path) -> Iterator[Path]:
    for path in out.rglob("*"):
        if path.is_file():
            yield path


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])

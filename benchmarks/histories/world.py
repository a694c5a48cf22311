"""One run whose true ancestry is known: real guard, real checkpoints, real journal, a model of nine numbers, one process.

The truth is kept beside the run and never read from it: `Saved.ancestry` and `World.present` list the (launch, step) pairs
that a checkpoint's weights, or the present ones, descend from. Launches write the entries that `chronicle run` writes.
Rollbacks and undos go through the command line.
"""

import contextlib
import hashlib
import io
import os
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chronicle.checkpoints import checkpoints_left, stamps_below
from chronicle.cli.main import run as chronicle
from chronicle.journal import JournalWriter, read_journal
from chronicle.metrics import MetricsWriter
from chronicle.paths import RunPaths

RUN = "history"
SAVE_EVERY = 5
Ancestry = tuple[tuple[int, int], ...]  # (launch, step) in step order


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A checkpoint as it was saved: which steps its weights descend from."""

    step: int
    launch: int
    ancestry: Ancestry


@dataclass(slots=True, kw_only=True)
class Started:
    """What is true of one launch."""

    number: int
    start_step: int
    guarded: bool
    parent: int | None  # the launch whose weights it continued
    stepped: bool  # it completed an optimizer step and was not refused


@dataclass(slots=True)
class World:
    """A run below `home` and the truth about it."""

    home: Path
    present: Ancestry = ()
    on_disk: dict[str, Saved] = field(default_factory=dict)  # name in the checkpoint root -> what it holds
    launches: list[Started] = field(default_factory=list)
    undoable: list[tuple[Ancestry, dict[str, Saved]]] = field(default_factory=list)
    told: list[str] = field(default_factory=list)  # what was done, for a report of a mismatch
    neighbours: dict[Path, str] = field(default_factory=dict)  # directories that nobody may change -> digest of all of it
    _places: int = 0
    trespasses: list[str] = field(default_factory=list)  # what was written where nothing may be written

    @property
    def paths(self) -> RunPaths:
        """The run's files."""
        return RunPaths(self.home / "logs" / RUN)

    @property
    def root(self) -> Path:
        """The checkpoint root."""
        return self.home / "checkpoints"

    @property
    def newest(self) -> str | None:
        """The checkpoint that a trainer without a plan would resume from: the highest step."""
        return max(self.on_disk, key=lambda name: self.on_disk[name].step, default=None)

    def create(self) -> None:
        """Make the directories and the journal."""
        self.root.mkdir(parents=True)
        code, text = self.command("init", "--run", RUN, "--checkpoints", "checkpoints")
        assert code == 0, text

    def command(self, *argv: str) -> tuple[int, str]:
        """Exit code and output of one `chronicle` command in the run's directory."""
        out = io.StringIO()
        with _inside(self.home), contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            code = chronicle(list(argv))
        return code, out.getvalue()

    def launch(
        self,
        load: str | None,
        steps: int,
        *,
        guarded: bool = True,
        on_purpose: bool = False,
        killed: bool = False,
        logs_first: bool = True,
        save_every: int = SAVE_EVERY,
        log_every: int = 1,
    ) -> bool:
        """Start from checkpoint `load` (None: from scratch) and train `steps` steps; False when the guard refused.

        `on_purpose`: an older checkpoint or a fresh start is accepted. `killed`: no `launch.end` is written. `logs_first`: the
        script logs a step before the optimizer's, so that a refused launch leaves a row.
        """
        number = len(self.launches) + 1
        source = None if load is None else self.on_disk[load]
        start = 0 if source is None else source.step
        started = Started(
            number=number,
            start_step=start,
            guarded=guarded,
            parent=None if source is None or not source.ancestry else source.ancestry[-1][0],
            stepped=False,
        )
        self.launches.append(started)
        self.told.append(
            f"launch {number}: {load or 'scratch'}, {steps} steps, guarded={guarded}, on_purpose={on_purpose}, "
            f"killed={killed}, save_every={save_every}"
        )
        directory = self.paths.launch_dir(number)
        directory.mkdir(parents=True)
        with JournalWriter(self.paths) as writer:
            argv = ["python", "train.py", str(start), str(start + steps)]
            data = {"argv": argv, "cwd": str(self.home), "host": "node-1", "pid": 1, "token": f"{number:032d}"}
            writer.append("launch.start", launch=number, title=f"launch {number}", data=data)
            before = stamps_below([str(self.root)])
            log = _SparseLog(MetricsWriter(directory / "metrics.jsonl"), log_every)
            ancestry = list(() if source is None else source.ancestry)
            code, last = 0, start
            with _environment(self.home, self.paths, number, guarded):
                try:
                    for step in self._train(load, start, steps, log, logs_first, on_purpose):
                        last = step
                        ancestry.append((number, step))
                        started.stepped = True
                        if step % save_every == 0:
                            yield_name = f"opt_step-{step}"
                            self.on_disk[yield_name] = Saved(step=step, launch=number, ancestry=tuple(ancestry))
                except Refusal:
                    code = 78
            log.close()
            if started.stepped:
                self.present = tuple(ancestry)
            if not killed:
                logged = last if code == 0 or not logs_first else last + 1
                end = {"host": "node-1", "exit_code": code, "signal": None, "last_step": logged if logged else None}
                writer.append("launch.end", launch=number, step=logged or None, title=f"launch {number} ended", data=end)
                entries = read_journal(self.paths).entries
                for saved, seen in checkpoints_left([str(self.root)], before, entries, writer.place.run_id):
                    writer.write(seen, launch=number, step=saved)
        if code:
            self.told.append("  refused")
        return code == 0

    def _train(
        self, load: str | None, start: int, steps: int, log: "_SparseLog", logs_first: bool, on_purpose: bool
    ) -> Iterator[int]:
        import torch
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState, GradientState, PartialState

        import chronicle as package
        from chronicle.resume.adapters import hooks

        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state() if state is not AcceleratorState else state._reset_state(reset_partial_state=True)
        hooks._sessions.clear()  # the launches before this one are over: in life their processes are gone
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
        accepted = {"checkpoint": "side try", "lr": "side try"} if on_purpose else None
        accelerator: Any = Accelerator(cpu=True)
        accelerator = package.guard(accelerator, fresh_start=on_purpose and load is None, accept_change=accepted)
        model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
        try:
            if load is not None:
                accelerator.load_state(str(self.root / load))
            for step in range(start + 1, start + steps + 1):
                inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
                loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
                accelerator.backward(loss)
                values = {"loss": loss.item(), "lr": optimizer.param_groups[0]["lr"]}
                if logs_first:
                    log.write(step, values)
                optimizer.step()
                if not logs_first:
                    log.write(step, values)
                schedule.step()
                optimizer.zero_grad()
                if step % SAVE_EVERY == 0:
                    accelerator.save_state(str(self.root / f"opt_step-{step}"))
                yield step
        except package.ResumeRefused as problem:
            raise Refusal from problem
        finally:
            for session in tuple(hooks._sessions):  # in life the process would wait for them at its exit
                session.sealer.finish()

    def rollback(self, name: str) -> bool:
        """`chronicle rollback` to a checkpoint on disk; False when it was refused."""
        target = self.on_disk[name]
        code, text = self.command("rollback", "--to", str(target.step), "--lr-scale", "0.9", "--yes")
        self.told.append(f"rollback to {name}: {code}")
        if code:
            self.told.append("  " + text.strip().replace("\n", " | ")[:300])
            return False
        self.undoable.append((self.present, dict(self.on_disk)))
        self.on_disk = {key: saved for key, saved in self.on_disk.items() if saved.step <= target.step}
        self.present = target.ancestry
        return True

    def undo(self) -> bool:
        """`chronicle undo` of the last rollback that stands; what launches saved since then is moved aside."""
        code, text = self.command("undo", "--yes")
        self.told.append(f"undo: {code}")
        if code:
            self.told.append("  " + text.strip().replace("\n", " | ")[:300])
            return False
        self.present, self.on_disk = self.undoable.pop()
        return True


    def move(self) -> None:
        """Rename the project's directory."""
        self.told.append("move")
        target = self._free_place()
        self.home.rename(target)
        self.home = target

    def visit_copy(self, command: tuple[str, ...]) -> None:
        """Copy the project and try to write into the copy: it must be refused with 3, and nothing may change anywhere."""
        self.told.append(f"copy, then `{' '.join(command)}` in it")
        copy = self._free_place()
        shutil.copytree(self.home, copy, symlinks=True)
        before = {place: digest_of(place) for place in (self.home, copy)}
        code, text = World(copy).command(*command)
        if code != 3:
            self.trespasses.append(f"`{' '.join(command)}` in a copy ended with {code}: {text.strip()[:200]}")
        self.trespasses += [f"`{place.name}` was changed" for place, digest in before.items() if digest_of(place) != digest]
        shutil.rmtree(copy)

    def fork(self) -> None:
        """Copy the project, declare the copy a fork and go on in it; the original becomes a neighbour."""
        self.told.append("fork")
        copy, origin = self._free_place(), self.home
        shutil.copytree(origin, copy, symlinks=True)
        self.neighbours[origin] = digest_of(origin)
        self.home = copy
        code, text = self.command("init", "--fork-of", str(origin / "logs" / RUN), "--run", RUN)
        if code:
            self.trespasses.append(f"fork ended with {code}: {text.strip()[:200]}")

    def changed_neighbours(self) -> list[str]:
        """What was written outside the run."""
        changed = [f"neighbour `{p.name}` was changed" for p, digest in self.neighbours.items() if digest_of(p) != digest]
        return [*self.trespasses, *changed]

    def _free_place(self) -> Path:
        """A place where nothing ever was: a copy in the original's own place is not recognised (docs/promises.md)."""
        self._places += 1
        return self.home.with_name(f"place-{self._places}")


def digest_of(directory: Path) -> str:
    """SHA-256 over the names and bytes of everything below a directory."""
    found = hashlib.sha256()
    for folder, folders, names in os.walk(directory):
        folders.sort()
        for name in sorted(names):
            path = Path(folder) / name
            found.update(f"{path.relative_to(directory)}\0".encode() + path.read_bytes())
    return found.hexdigest()


class _SparseLog:
    """A per-step log that writes every n-th step."""

    def __init__(self, log: MetricsWriter, every: int) -> None:
        self.log, self.every = log, every

    def write(self, step: int, values: dict[str, float]) -> None:
        """Write one step, if it is its turn."""
        if step % self.every == 0:
            self.log.write(step, values)

    def close(self) -> None:
        """Close the file."""
        self.log.close()


class Refusal(Exception):
    """The guard refused a launch."""


@contextlib.contextmanager
def _inside(directory: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def _environment(home: Path, paths: RunPaths, launch: int, guarded: bool) -> Iterator[None]:
    before = dict(os.environ)
    os.environ |= {
        "CHRONICLE_RUN_DIR": str(paths.run_dir),
        "CHRONICLE_LAUNCH": str(launch),
        "CHRONICLE_LAUNCH_DIR": str(paths.launch_dir(launch)),
        "CHRONICLE_GUARD": "enforce" if guarded else "off",
    }
    try:
        with _inside(home), warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        os.environ.clear()
        os.environ |= before

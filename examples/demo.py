"""`make demo`: a real run on two processes diverges, is rolled back and recovers; every step is a `chronicle` command.

The script starts commands, shows the trainer's progress from its per-step log, and takes the rollback target from
`chronicle watch --once --json`. It writes no loss, event or proposal itself. The cause of the divergence is real: the recipe
`demo` raises its LR on purpose, as exp8 of the 80B run did. Exit code 1 when a result is not the expected one.
"""

import argparse
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from chronicle.metrics import read_metrics
from chronicle.paths import RunPaths

ROOT = Path(__file__).resolve().parent.parent
MARKER = ".chronicle-demo"
BIN = Path(sys.executable).parent
REFUSED = 78
RANK_PREFIX = re.compile(r"^\[\d+\] ")
LAUNCHERS = {
    "torchrun": "torchrun --standalone --nproc_per_node 2 -m bit_transformer.train --recipe demo",
    "deepspeed": "torchrun --standalone --nproc_per_node 2 -m bit_transformer.train --recipe demo --set sharding=zero2",
}


class Demo:
    """The scenes of the demo, played in one directory."""

    def __init__(self, directory: Path, launcher: str, console: Console) -> None:
        self.directory = directory
        self.launcher = launcher
        self.console = console
        self.paths = RunPaths(directory / "logs" / "demo")
        self.started = time.monotonic()
        path = f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}"
        keep = {name: value for name, value in os.environ.items() if not name.startswith("CHRONICLE_")}
        self.environment = keep | {"PATH": path, "OMP_NUM_THREADS": "1"}

    def play(self) -> None:
        """Play all scenes; raises `SystemExit` with a sentence when a result is not the expected one."""
        self.scene("Set up a run")
        self.command("chronicle init --run demo --logs logs --checkpoints checkpoints")
        self.command(
            "chronicle note 'exp8 again: the LR will be raised on purpose, hoping for another descent track' "
            "--expect 'it may well be too much' --tag exp8"
        )
        self.scene("Train on two processes: a raised LR makes the loss diverge, chronicle detects it and stops the launch")
        code = self.launch(f"chronicle run --on-propose stop -- {LAUNCHERS[self.launcher]}", 1)
        self.command("chronicle status")
        target = self.proposed_step()
        self.scene(f"Roll back to step {target} with half the LR, in every file that holds it")
        self.command(f"chronicle rollback --to {target} --lr-scale 0.5 --yes")
        self.scene("A faulty resume that does not restore the LR schedule: the guard refuses it before its first step")
        code = self.launch(f"chronicle run -- {LAUNCHERS[self.launcher]} --accident schedule-restarts", 2)
        self.expect(code == REFUSED, f"the broken resume ended with code {code}, expected {REFUSED}")
        self.expect(not list(self.points(2)), "the broken resume took a step")
        self.scene("A correct resume passes the guard, and the loss recovers")
        code = self.launch(f"chronicle run -- {LAUNCHERS[self.launcher]}", 3)
        self.expect(code == 0, f"the resumed launch ended with code {code}")
        self.scene("The history of the run")
        self.command("chronicle log --graph")
        self.command("chronicle report --markdown")
        self.conclude(target)

    def scene(self, title: str) -> None:
        """A heading."""
        self.console.print()
        self.console.print(f"[bold]── {title}[/bold]", highlight=False)

    def command(self, line: str) -> str:
        """Show and run one command; its output is the demo's output."""
        self.console.print(f"[bold cyan]$[/bold cyan] {line}", highlight=False, soft_wrap=True)
        done = subprocess.run(
            shlex.split(line), cwd=self.directory, env=self.environment, stdout=subprocess.PIPE, text=True
        )
        sys.stdout.write(done.stdout)
        sys.stdout.flush()
        self.expect(done.returncode == 0, f"`{line}` ended with code {done.returncode}")
        return done.stdout

    def launch(self, line: str, number: int) -> int:
        """Start a launch, show its progress from the trainer's log, keep its output in a file; returns its exit code."""
        self.console.print(f"[bold cyan]$[/bold cyan] {line}", highlight=False, soft_wrap=True)
        log = self.directory / f"launch-{number}.out"
        with log.open("wb") as out:
            process = subprocess.Popen(
                shlex.split(line), cwd=self.directory, env=self.environment, stdout=out, stderr=subprocess.STDOUT
            )
            try:
                self.follow(process, number)
            finally:
                if process.poll() is None:
                    process.terminate()
                code = process.wait()
        for text in told(log.read_text(encoding="utf-8", errors="replace").splitlines()):
            self.console.print(f"  {text}", style="dim", highlight=False, markup=False, soft_wrap=True)
        self.console.print(f"  (ended with code {code}; everything it printed: {shown(log)})", highlight=False)
        return code

    def follow(self, process: "subprocess.Popen[bytes]", number: int) -> None:
        """Show a bar on a terminal, a line every 100 steps elsewhere."""
        columns = (BarColumn(30), TextColumn("step {task.completed:>4.0f}  {task.description}"), TimeElapsedColumn())
        shown = 0
        with Progress(
            *columns, console=self.console, transient=False, disable=not self.console.is_terminal
        ) as progress:
            bar = progress.add_task("starting two processes …", total=TOTAL_STEPS)
            while process.poll() is None:
                time.sleep(0.5)
                seen = deque(self.points(number), maxlen=1)
                if not seen:
                    continue
                last = seen[0]
                loss, lr = last.values.get("loss", math.nan), last.values.get("lr", math.nan)
                text = f"loss {loss:.4f} nats/bit  lr {lr:.2e}"
                progress.update(bar, completed=last.step, description=text)
                if not self.console.is_terminal and last.step // 100 > shown:
                    shown = last.step // 100
                    print(f"  step {last.step:>4}  {text}", flush=True)

    def points(self, number: int) -> Any:
        """The points that a launch has logged so far."""
        path = self.paths.metrics_path(number)
        return read_metrics(path) if path.exists() else iter(())

    def proposed_step(self) -> int:
        """The target step of `chronicle watch --once`."""
        self.console.print("[bold cyan]$[/bold cyan] chronicle watch --once --json", highlight=False)
        done = subprocess.run(
            ["chronicle", "watch", "--once", "--json"],
            cwd=self.directory,
            env=self.environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        answer = json.loads(done.stdout) if done.stdout.strip() else {}
        proposals = answer.get("proposals") or ([answer["proposal"]] if answer.get("proposal") else [])
        self.expect(bool(proposals), "chronicle proposed nothing: the run did not diverge")
        proposal = proposals[-1]
        self.console.print(f"  {proposal['command']}", highlight=False)
        return int(proposal["target_step"])

    def conclude(self, target: int) -> None:
        """Compare the losses that the two launches logged."""
        first = {p.step: p.values["loss"] for p in self.points(1) if p.values.get("loss") is not None}
        second = {p.step: p.values["loss"] for p in self.points(3) if p.values.get("loss") is not None}
        worst, before, after = tail_mean(first), mean_near(first, target), tail_mean(second)
        self.console.print()
        self.console.print(
            f"loss in nats/bit: {before:.4f} at the rollback target, {worst:.4f} after the divergence, "
            f"{after:.4f} after the rollback"
        )
        self.console.print(f"the story    {shown(self.paths.chronicle_md)}")
        for picture in sorted((self.paths.run_dir / "plots").glob("*.png")):
            self.console.print(f"the picture  {shown(picture)}")
        self.console.print(f"{time.monotonic() - self.started:.0f} s in all")
        self.expect(worst > before and after < before, "the resumed run did not recover below the loss it went back to")

    def expect(self, holds: bool, sentence: str) -> None:
        """End the demo with one sentence when a result is not the expected one."""
        if not holds:
            raise SystemExit(f"error: {sentence}")


TOTAL_STEPS = 600


def told(lines: Iterable[str]) -> Iterator[str]:
    """The lines that chronicle printed, with the guard's table."""
    in_table = False
    for line in lines:
        said = RANK_PREFIX.sub("", line)
        in_table = said.startswith("chronicle guard:") or (in_table and said.startswith("  "))
        if in_table or said.startswith(("chronicle:", "error:", "hint:")):
            yield said


def shown(path: Path) -> str:
    """A path, relative to the current directory where it lies below it."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def tail_mean(losses: dict[int, float]) -> float:
    """Mean of the last 50 logged losses."""
    values = [losses[step] for step in sorted(losses)][-50:]
    return sum(values) / max(1, len(values))


def mean_near(losses: dict[int, float], step: int) -> float:
    """Mean of the 50 losses up to a step."""
    values = [losses[s] for s in sorted(losses) if s <= step][-50:]
    return sum(values) / max(1, len(values))


def main() -> int:
    """Play the demo in a fresh directory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--launcher", choices=sorted(LAUNCHERS), default="torchrun")
    parser.add_argument("--directory", type=Path, default=ROOT / "demo")
    arguments = parser.parse_args()
    directory = arguments.directory.resolve()
    if directory.exists() and any(directory.iterdir()) and not (directory / MARKER).exists():
        print(f"error: `{directory}` is not an earlier demo; name another with --directory", file=sys.stderr)
        return 1
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    (directory / MARKER).touch()
    Demo(directory, arguments.launcher, Console(highlight=False)).play()
    return 0


if __name__ == "__main__":
    sys.exit(main())

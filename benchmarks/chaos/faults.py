"""Twelve kinds of fault, drawn at random steps, and how a rank does each of them to itself, its launcher or its checkpoint.

A fault belongs to a step of the run and strikes once: the first rank process that gets there notes it (`struck-<n>-<rank>`)
and does it. Nothing here knows how chronicle looks at it.
"""

import itertools
import json
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

KILLS = ("kill_rank", "kill_launcher", "kill_supervisor")  # one kind of the twelve, with three victims
KINDS = (
    *KILLS, "collective", "stopped", "gil", "dead_loader", "disk_full", "nan", "poisoned", "kill_in_save", "truncated",
    "lr_wiped", "slow_rank",
)  # fmt: skip
AT_A_SAVE = ("poisoned", "kill_in_save", "disk_full")
BY_RANK_0 = ("kill_in_save", "disk_full", "truncated")
HANGS = ("collective", "stopped", "gil")
SLOW_STEPS, SLOW_SECONDS = 130, 0.1
BALLAST = "ballast"  # the file that fills the disk


class Fault(NamedTuple):
    """`rank` does it when `step` steps are done; a fault at a save does it in the save of that step."""

    number: int
    kind: str
    step: int
    rank: int


def draw(count: int, seed: int, save_every: int, gap: tuple[int, int], kinds: tuple[str, ...] = KINDS) -> list[Fault]:
    """So many faults, every kind equally often, in random order at random distances."""
    chance = random.Random(seed)
    pool = [kinds[place % len(kinds)] for place in range(count)]
    chance.shuffle(pool)
    found, step = [], 2 * save_every
    for number, kind in enumerate(pool):
        step += chance.randint(*gap)
        if kind in AT_A_SAVE:
            step = -(-step // save_every) * save_every
        elif step % save_every == 0:
            step += 1  # exactly at a save it would lose nothing
        found.append(Fault(number, kind, step, 0 if kind in BY_RANK_0 else chance.randint(0, 1)))
        step += SLOW_STEPS if kind == "slow_rank" else 0
    return found


class Planted:
    """The faults of a campaign, as one rank process sees them."""

    def __init__(self, directory: Path, rank: int) -> None:
        self.directory, self.rank = directory, rank
        self.faults = [Fault(*one) for one in json.loads((directory / "faults.json").read_text())]
        self.slow = range(0)
        self.cut_at = 0  # bytes of the next file that `torch.save` writes; 0: all of them
        self.nan = False

    def strikes(self, fault: Fault) -> bool:
        """Whether it has not struck yet; from now on it has."""
        try:
            handle = os.open(
                self.directory / f"struck-{fault.number}-{self.rank}", os.O_CREAT | os.O_EXCL | os.O_WRONLY
            )
        except FileExistsError:
            return False
        os.write(handle, f"{time.time():.3f}".encode())
        os.close(handle)
        return True

    def before_step(self, done: int) -> None:
        """`done` steps are done."""
        if done in self.slow:
            time.sleep(SLOW_SECONDS)
        for fault in self.faults:
            if fault.step == done and fault.kind not in AT_A_SAVE and fault.rank == self.rank and self.strikes(fault):
                getattr(self, f"do_{fault.kind}")(done)

    def before_save(self, done: int, model: Any) -> None:
        """In the save of step `done`."""
        for fault in self.faults:
            if fault.step != done or fault.kind not in AT_A_SAVE:
                continue
            if fault.kind == "poisoned" and self.strikes(fault):
                next(iter(model.parameters())).data.view(-1)[0] = float("nan")
            elif self.rank == fault.rank and fault.kind != "poisoned" and self.strikes(fault):
                getattr(self, f"do_{fault.kind}")(done)

    # --- what strikes

    def do_kill_rank(self, done: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def do_kill_launcher(self, done: int) -> None:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)  # it does not go on by itself

    def do_kill_supervisor(self, done: int) -> None:
        """The launcher's parent, where that is chronicle; a bare launcher has none, and dies itself."""
        with open(f"/proc/{os.getppid()}/stat") as stat:
            above = int(stat.read().rsplit(")", 1)[1].split()[1])
        os.kill(above if "CHRONICLE_LAUNCH" in os.environ else os.getppid(), signal.SIGKILL)
        time.sleep(60)

    def do_collective(self, done: int) -> None:
        import torch
        import torch.distributed as dist

        dist.recv(torch.ones(1), src=1 - self.rank)  # the other rank reduces gradients: neither ever returns

    def do_stopped(self, done: int) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def do_gil(self, done: int) -> None:
        sum(itertools.repeat(1))

    def do_dead_loader(self, done: int) -> None:
        for worker in multiprocessing.active_children():
            os.kill(worker.pid or 0, signal.SIGKILL)

    def do_slow_rank(self, done: int) -> None:
        self.slow = range(done, done + SLOW_STEPS)

    def do_truncated(self, done: int) -> None:
        newest = newest_checkpoint(self.directory)
        if newest is not None:
            weights = next(newest.rglob("model*.safetensors"))
            os.truncate(weights, weights.stat().st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)

    def do_lr_wiped(self, done: int) -> None:
        """The schedule begins anew in the launch that follows."""
        (self.directory / "accident").touch()
        os.kill(os.getpid(), signal.SIGKILL)

    def do_nan(self, done: int) -> None:
        self.nan = True

    def do_kill_in_save(self, done: int) -> None:
        self.cut_at = 1500

    def do_disk_full(self, done: int) -> None:
        """Nothing is left where the checkpoints are, until somebody outside removes the ballast."""
        with open(self.directory / "disk" / BALLAST, "wb") as file:
            try:
                while True:
                    file.write(bytes(1 << 16))
                    file.flush()
            except OSError:
                pass  # that is what was wanted

    def take_accident(self) -> bool:
        """Whether this launch begins with a wiped LR; on every rank, once."""
        mark = self.directory / f"accident-taken-{self.rank}"
        if not (self.directory / "accident").exists() or mark.exists():
            return False
        mark.touch()
        if all((self.directory / f"accident-taken-{rank}").exists() for rank in (0, 1)):
            for name in ("accident", "accident-taken-0", "accident-taken-1"):
                (self.directory / name).unlink(missing_ok=True)
        return True


def newest_checkpoint(directory: Path) -> Path | None:
    """The one with the highest number, whole or not: what a script takes that asks nobody."""
    found = [path for path in (directory / "disk/checkpoints").glob("opt_step-*") if path.is_dir()]
    return max(found, key=lambda path: int(path.name.rsplit("-", 1)[1]), default=None)

"""Five kinds of end, five times each, of pods that are namespaces: `chronicle run` is pid 1, and the root is read-only.

    python -m tests.launch.pods [--only KIND] [--times 5] [--out pods.json]

A loop stands for the Job of `examples/kubernetes/job.yaml`: it starts a pod of another name when the last one has ended with a
code that the manifest replaces. Evicted: TERM, and KILL after the grace.
Killed: everything at once, as for a lost node. Rank, supervisor and keeper: KILL of that process. Counted are the ends after
which the run went on from the last complete save.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.slurm.__main__ import ROOT, TRAIN, make_checkpoints
from chronicle.journal import read_journal
from chronicle.journal.events import EntryKind, Restarted, events_of
from chronicle.launch.processes import Process, list_processes, read_command, read_environment
from chronicle.paths import RunPaths

KINDS = ("evicted", "killed", "rank_killed", "supervisor_killed", "keeper_killed")
REPLACED = (137, 138, 143)  # as the manifest says
MARK = "POD_BENCHMARK"
GRACE = 6


def why_not() -> str:
    """Why there can be no pods here; "" where there can."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return "namespaces want root and `unshare`"
    tried = ["unshare", "-m", "-u", "-p", "--fork", "--mount-proc", "true"]
    done = subprocess.run(tried, capture_output=True, text=True, check=False)
    return f"namespaces are not allowed: {done.stderr.strip()}" if done.returncode else ""


class Pods:
    """One Job: its pods, one after the other."""

    def __init__(self, kind: str, directory: Path, made: Path) -> None:
        self.kind, self.directory, self.count = kind, directory, 0
        directory.mkdir(parents=True)
        shutil.copy(TRAIN, directory / "train.py")
        (directory / "made").symlink_to(made)
        own = {key: value for key, value in os.environ.items() if not key.startswith(("CHRONICLE_", "SLURM_", "KUBERNETES_"))}
        self.environ = own | {"PYTHONPATH": str(ROOT), MARK: str(directory), "SAVE_SECONDS": "1"}
        self.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # the root is read-only
        self.pod: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the next pod: chronicle is pid 1 in it, and may write to its volume, /tmp and /dev/shm only."""
        self.count += 1
        words = [sys.executable, "-m", "chronicle_ml", "run", "--run", "demo", "--restarts", "20", "--restart-pause", "0.5",
                 "--grace", f"{GRACE}", "--checkpoints", "checkpoints",
                 "--", sys.executable, "train.py"]  # fmt: skip
        here, name = self.directory, self.kind.replace("_", "-")
        inner = (f"mount --bind {here} {here}; mount -o remount,ro,bind /; mount -t tmpfs tmp /tmp; "
                 f"mount -t tmpfs shm /dev/shm; cd {here}; hostname {name}-{self.count}; "
                 'exec "$@"')  # fmt: skip
        for place, name in (("/tmp", "tmp"), ("/dev/shm", "shm")):
            if here.is_relative_to(place):
                inner = inner.replace(f"mount -t tmpfs {name} {place}; ", "")  # the volume lies there
        command = ["unshare", "-m", "-u", "-p", "--fork", "--mount-proc", "--kill-child", "bash", "-c", inner, "pod", *words]
        with open(here / "out.txt", "ab") as out:
            self.pod = subprocess.Popen(command, env=self.environ, stdin=subprocess.DEVNULL, stdout=out, stderr=out)

    def ours(self, name: str) -> list[Process]:
        """The pod's processes whose command names `name`, parents first."""
        found = [one for one in list_processes() if (read_environment(one.pid) or {}).get(MARK) == str(self.directory)]
        named = (one for one in found if any(name in word for word in read_command(one.pid)))
        return sorted(named, key=lambda one: one.start_ticks)

    def truth(self) -> list[dict[str, Any]]:
        """What the trainer noted."""
        path = self.directory / "truth.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def strike(self) -> None:
        """End the pod, or something in it, in the way of this kind."""
        trainer = [one for one in self.ours("train.py") if "CHRONICLE_LAUNCH" in (read_environment(one.pid) or {})][-1]
        supervisor = trainer.parent
        keeper = next(one.parent for one in list_processes() if one.pid == supervisor)
        if self.kind == "killed":
            assert self.pod is not None
            self.pod.kill()
        else:
            victim, number = {
                "evicted": (keeper, signal.SIGTERM), "rank_killed": (trainer.pid, signal.SIGKILL),
                "supervisor_killed": (supervisor, signal.SIGKILL), "keeper_killed": (keeper, signal.SIGKILL),
            }[self.kind]  # fmt: skip
            os.kill(victim, number)

    def play(self, times: int, chance: random.Random) -> dict[str, Any]:
        """Strike so often, let it finish, judge."""
        seconds, codes, launch = [], [], 0
        self.start()
        for _ in range(times):
            wanted = chance.randint(3, 25)
            if not self._until(functools.partial(self._steps, launch, wanted), codes):
                break
            launch = max(one["launch"] for one in self.truth())
            began = time.monotonic()
            self.strike()
            if not self._until(functools.partial(self._steps, launch, 1), codes):
                break
            seconds.append(round(time.monotonic() - began, 1))
        (self.directory / "finish").touch()
        deadline = time.monotonic() + 60
        while self.pod is not None and self.pod.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
        wrong, saved = [], 0
        for one in self.truth():
            saved = one["step"] if one["event"] == "saved" else saved
            if one["event"] == "started" and one["node"] == 0 and one["step"] != saved:
                wrong.append({"started": one["step"], "saved": saved})
        entries = read_journal(RunPaths(self.directory / "logs/demo")).entries
        ends = [f"{one.data.get('cause')}: {one.data.get('because')}" for one in entries if one.kind == EntryKind.LAUNCH_END]
        return {"kind": self.kind, "times": times, "went_on": len(seconds), "wrong_resumes": wrong, "seconds": seconds,
                "codes": codes, "pods": self.count, "ends": ends,
                "finished": self.pod is not None and self.pod.poll() == 0,
                "decisions": [event.decision for _, event in events_of(entries, Restarted)]}  # fmt: skip

    def _steps(self, launch: int, count: int) -> bool:
        """Whether so many steps were done after this launch."""
        return sum(one["event"] == "step" and one["launch"] > launch for one in self.truth()) >= count

    def _until(self, condition: Any, codes: list[int]) -> bool:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if condition():
                return True
            code = None if self.pod is None else self.pod.poll()
            if code is not None:
                killed = self.kind == "keeper_killed" and code == 1  # `unshare` cannot repeat a KILL of its child
                codes.append(137 if killed else code if code >= 0 else 128 - code)
                if codes[-1] not in REPLACED:
                    return False
                self.start()
            time.sleep(0.2)
        return False

    def close(self) -> None:
        """Leave nothing."""
        if self.pod is not None:
            self.pod.kill()
            self.pod.wait()


def show(rows: Sequence[dict[str, Any]]) -> None:
    """The table."""
    print(f"{'kind':<20}{'times':>6}{'went on':>9}{'wrong resumes':>15}{'pods':>6}{'finished':>10}  seconds to the next step")
    for row in rows:
        print(f"{row['kind']:<20}{row['times']:>6}{row['went_on']:>9}{len(row['wrong_resumes']):>15}{row['pods']:>6}"
              f"{'yes' if row['finished'] else 'no':>10}  {row['seconds']}")  # fmt: skip


def main() -> int:
    """Play what is asked for, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", action="append", default=[], choices=KINDS)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("pods.json"))
    parser.add_argument("--keep", type=Path, help="directory that keeps all files")
    arguments = parser.parse_args()
    if reason := why_not():
        print(f"no pods here: {reason}")
        return 2
    base = arguments.keep or Path(tempfile.mkdtemp(prefix="pods-"))
    rows = []
    try:
        made = make_checkpoints(base / "made")
        for kind in arguments.only or KINDS:
            pods = Pods(kind, base / kind, made)
            try:
                rows.append(pods.play(arguments.times, random.Random(kind)))
            finally:
                pods.close()
    finally:
        if arguments.keep is None:
            shutil.rmtree(base, ignore_errors=True)
    arguments.out.write_text(json.dumps(rows, indent=1))
    show(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())

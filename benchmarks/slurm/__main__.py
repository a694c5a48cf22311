"""Ten kinds of interruption, five times each, on a real SLURM of three nodes, with the batch script as it is printed.

    python -m benchmarks.slurm [--only KIND] [--times 5] [--out slurm.json] [--nodes 3]

Each kind is one job that suffers it five times and is then told to finish. Counted are the interruptions after which the
run went on from the last complete save, saves that were cut although the launch was warned, starts from another checkpoint,
and recorded causes that are not the true one. Jobs run side by side, those that take a node or all of them on a cluster of
their own.
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
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks.slurm.cluster import Cluster, why_not
from chronicle.journal import read_journal
from chronicle.journal.events import EntryKind
from chronicle.launch.processes import Process, list_processes, read_command, read_environment
from chronicle.paths import RunPaths

ROOT = Path(__file__).resolve().parents[2]
TRAIN = Path(__file__).with_name("train.py")
GRACE = 8
WARNED = ("usr1", "usr1_in_a_save", "preempted", "time_limit")  # the launch was told in time: its save must be whole
TRUE = {
    "usr1": ("preempted",), "usr1_at_the_start": ("preempted",), "usr1_in_a_save": ("preempted",), "preempted": ("preempted",),
    "time_limit": ("time limit",), "node_death": ("node lost",), "rank_killed": ("crash",), "supervisor_killed": ("crash",),
    "requeued": ("stopped by a person", "unknown", "crash"), "hang": ("hang",),
}  # fmt: skip
OWN_CLUSTER = ("preempted", "node_death")
MADE = 1500  # checkpoints in stock
LONGEST_SECONDS = 420.0  # an end for what never comes; nothing is judged by it
HURRY_SECONDS = 1.0


class Job:
    """One job of one kind, or an array of as many `tasks`."""

    def __init__(
        self, kind: str, cluster: Cluster, directory: Path, made: Path, seed: int, *,
        nodes: int = 0, tasks: int = 0, grace: int = GRACE,
    ) -> None:
        self.kind, self.cluster, self.directory, self.chance = kind, cluster, directory, random.Random(f"{kind}{seed}")
        self.hurried: set[str] = set()  # starts of the job that were told to come soon
        directory.mkdir(parents=True)
        shutil.copy(TRAIN, directory / "train.py")
        (directory / "made").symlink_to(made)
        wrapper = directory / "bin/chronicle"
        wrapper.parent.mkdir()
        wrapper.write_text(f'#!/bin/sh\nexec {sys.executable} -m chronicle_ml "$@"\n')
        wrapper.chmod(0o755)
        own = {
            key: value
            for key, value in cluster.environ.items()
            if not key.startswith(("CHRONICLE_", "PYTHONDONTWRITE"))
        }
        self.environ = own | {"PYTHONPATH": str(ROOT), "PATH": f"{wrapper.parent}:{own['PATH']}"}
        checkpoints = "checkpoints/$SLURM_ARRAY_TASK_ID" if tasks else "checkpoints"
        words = ["chronicle", "run", "--sbatch", str(nodes or cluster.count), "--run", "demo", "--grace", f"{grace}",
                 "--on-stall", "stop", "--restart-pause", "1", "--checkpoints", checkpoints,
                 "--", sys.executable, "train.py", checkpoints]  # fmt: skip
        done = subprocess.run(words, cwd=directory, env=self.environ, capture_output=True, text=True, check=True)
        (directory / "job.sbatch").write_text(done.stdout)
        limit = ["--time=2"] if kind == "time_limit" else ["--time=60"]
        limit += [f"--array=0-{tasks - 1}"] if tasks else []
        words = ["sbatch", "--parsable", *limit, "job.sbatch"]
        self.id = subprocess.run(
            words, cwd=directory, env=self.environ, capture_output=True, text=True, check=True
        ).stdout.strip()

    # --- what is seen

    def truth(self, name: str = "truth.jsonl") -> list[dict[str, Any]]:
        """What the trainers noted."""
        path = self.directory / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def state(self) -> str:
        """The job's state by SLURM."""
        return self.cluster.ask("squeue", "-h", "-j", self.id, "-o", "%T").strip()

    def until(self, condition: Callable[[], bool], seconds: float = LONGEST_SECONDS) -> bool:
        """Wait for something; False where it does not come."""
        deadline, hurried = time.monotonic() + seconds, 0.0
        while time.monotonic() < deadline:
            if condition():
                return True
            if time.monotonic() > hurried + HURRY_SECONDS:
                self.hurry()
                hurried = time.monotonic()
            time.sleep(0.1 if self.kind == "usr1_in_a_save" else 0.3)
        return False

    def hurry(self) -> None:
        """A requeued job waits until its old credential is out of date (two minutes). That wait is not what is measured.

        Told once each time, and not for this very second: a credential of the second in which the old one was revoked is
        refused ("Job credential revoked"), and the job has failed.
        """
        asked = ("squeue", "-h", "-r", "-j", self.id, "-t", "PENDING", "-O", "JobArrayID:30,RestartCnt:10,Reason:30")
        for line in self.cluster.ask(*asked).splitlines():
            job, _, reason = words if len(words := line.split()) == 3 else ("", "", "")
            if reason == "BeginTime" and line not in self.hurried:
                self.hurried.add(line)
                self.cluster.ask("scontrol", "update", f"JobId={job}", "StartTime=now+2")

    def why(self) -> str:
        """What SLURM, its log and the job's own output say last, for a play that did not go on."""
        outputs = [*self.directory.glob("*.out"), *self.directory.glob("logs/demo*/launches/*/*.log")]
        parts = [self.cluster.ask("squeue", "-o", "%i %T %r %S"), self.cluster.ask("sinfo", "-N", "-h", "-o", "%N %T %E")]
        for path in (self.cluster.base / "slurmctld.log", *sorted(outputs)):
            parts.append(f"{path.name}:\n{path.read_text(errors='replace')[-1500:]}" if path.exists() else f"no {path.name}")
        return "\n".join(parts)

    def steps_since(self, count: int) -> int:
        """Steps of the first node among the notes after the first `count`."""
        return sum(one["event"] == "step" for one in self.truth()[count:])

    def processes(self, name: str) -> list[tuple[Process, dict[str, str]]]:
        """The job's processes whose command names `name`, by the environment that SLURM gave them."""
        found = []
        for process in list_processes():
            environ = read_environment(process.pid) or {}
            mine = environ.get("SLURM_JOB_ID") == self.id and environ.get("SLURM_CONF") == self.environ["SLURM_CONF"]
            if mine and any(name in word for word in read_command(process.pid)):
                found.append((process, dict(environ)))
        return found

    def trainer(self) -> Process:
        """The trainer of a random node."""
        mine = [one for one, environ in self.processes("train.py") if "CHRONICLE_LAUNCH" in environ]
        return self.chance.choice(mine)

    # --- the interruptions

    def interrupt(self, seen: int) -> None:
        """Do it once; `seen` notes were there before this start."""
        getattr(self, f"_{self.kind}")(seen)

    def _warm(self, seen: int) -> None:
        wanted = self.chance.randint(4, 24)
        self.until(lambda: self.steps_since(seen) >= wanted)
        saved = [one["launch"] for one in self.truth() if one["event"] == "saved"]
        launch = max(one["launch"] for one in self.truth())
        if launch > 2 and max(saved, default=0) < launch - 2:  # a third failure without a save is rightly the last
            self.until(lambda: any(one["event"] == "saved" for one in self.truth()[seen:]))
        time.sleep(self.chance.random())

    def _usr1(self, seen: int) -> None:
        self._warm(seen)
        self.cluster.ask("scancel", "--signal=USR1", self.id)

    def _usr1_at_the_start(self, seen: int) -> None:
        self.until(lambda: bool(self.processes("chronicle_ml")))
        time.sleep(self.chance.uniform(0.0, 4.0))
        self.cluster.ask("scancel", "--signal=USR1", self.id)

    def _usr1_in_a_save(self, seen: int) -> None:
        self.until(lambda: any(one["event"] == "saving" for one in self.truth()[seen:]))
        self.cluster.ask("scancel", "--signal=USR1", self.id)

    def _preempted(self, seen: int) -> None:
        self._warm(seen)
        words = [
            "sbatch",
            "--partition=high",
            f"--nodes={self.cluster.count}",
            "--exclusive",
            "--wrap=sleep 3",
            "--output=/dev/null",
        ]
        subprocess.run(words, env=self.cluster.environ, cwd=self.directory, capture_output=True, check=True)

    def _time_limit(self, seen: int) -> None:
        self.until(lambda: any(one["event"] == "stopped" for one in self.truth()[seen:]))

    def _node_death(self, seen: int) -> None:
        self._warm(seen)
        node = self.chance.choice(self.cluster.nodes)
        self.cluster.kill_node(node)
        self.until(lambda: "down" in self.cluster.ask("sinfo", "-h", "-n", node, "-o", "%T"))
        time.sleep(self.chance.uniform(0, 20))
        self.cluster.start_node(node)

    def _rank_killed(self, seen: int) -> None:
        self._warm(seen)
        os.kill(self.trainer().pid, signal.SIGKILL)

    def _supervisor_killed(self, seen: int) -> None:
        self._warm(seen)
        os.kill(self.trainer().parent, signal.SIGKILL)

    def _requeued(self, seen: int) -> None:
        self._warm(seen)
        self.cluster.ask("scontrol", "requeue", self.id)

    def _hang(self, seen: int) -> None:
        self._warm(seen)
        os.kill(self.trainer().pid, signal.SIGSTOP)

    # --- the whole

    def play(self, times: int) -> dict[str, Any]:
        """Interrupt it so often, let it finish, judge."""
        went_on, seconds, seen, why = 0, [], 0, ""
        for _ in range(times):
            if not self.until(functools.partial(self._began, seen)) and self.kind != "usr1_at_the_start":
                why = f"start {went_on + 1} did not begin\n{self.why()}"
                break
            before = len(self.truth())
            self.interrupt(seen)
            began = time.monotonic()
            launch = max((one["launch"] for one in self.truth()), default=0)
            if not self.until(functools.partial(self._went_on, before, launch)):
                why = f"it did not go on after interruption {went_on + 1}\n{self.why()}"
                break
            seconds.append(time.monotonic() - began)
            went_on += 1
            seen = next(place for place, one in enumerate(self.truth()) if one["launch"] > launch)
        (self.directory / "finish").touch()
        finished = self.until(lambda: self.state() in ("", "COMPLETED"), 180)
        state = self.cluster.ask("scontrol", "show", "job", self.id)
        done = "JobState=COMPLETED" in state
        if not finished:
            self.cluster.ask("scancel", self.id)
        if not done:
            why = why or f"it did not finish\n{self.why()}"
        return self._judge(times, went_on, seconds) | {"completed": done, "why": why}

    def _began(self, seen: int) -> bool:
        return any(one["event"] == "started" for one in self.truth()[seen:])

    def _went_on(self, before: int, launch: int) -> bool:
        return any(one["event"] == "step" and one["launch"] > launch for one in self.truth()[before:])

    def _judge(self, times: int, went_on: int, seconds: Sequence[float]) -> dict[str, Any]:
        saved, cut, wrong, open_save = 0, 0, [], None
        for one in self.truth():
            if one["event"] == "saving":
                open_save = one["step"]
            elif one["event"] == "saved":
                saved, open_save = one["step"], None
            elif one["event"] == "started" and one["node"] == 0:
                if one["step"] != saved:
                    wrong.append({"started": one["step"], "saved": saved, "launch": one["launch"]})
                cut += open_save is not None and self.kind in WARNED
                open_save = None
        entries = read_journal(RunPaths(self.directory / "logs/demo")).entries
        told: dict[int, list[str]] = {}
        for entry in entries:
            if entry.kind == EntryKind.RESTART:
                told.setdefault(entry.launch or 0, []).append(str(entry.data.get("cause")))
        causes = [cause for launch in sorted(told) for cause in told[launch][:1]]
        interrupted = [cause for cause in causes if cause not in ("finished", "ended")]
        because = [f"{entry.launch} {entry.data.get('host')}: {entry.data.get('cause')}: {entry.data.get('because')}"
                   for entry in entries if entry.kind == EntryKind.LAUNCH_END]  # fmt: skip
        return {
            "kind": self.kind, "times": times, "went_on": went_on, "cut_saves": cut, "wrong_resumes": wrong, "causes": causes,
            "false_causes": [cause for cause in interrupted if cause not in TRUE[self.kind]],
            "seconds": [round(one, 1) for one in seconds], "because": because,
        }  # fmt: skip


def make_checkpoints(directory: Path, number: int = MADE) -> Path:
    """Real checkpoints that the trainer only has to copy."""
    import torch

    directory.mkdir(parents=True)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    for step in range(1, number + 1):
        for moments in optimizer.state.values():
            moments["step"].fill_(step)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, directory / f"step-{step}.pt")
    return directory


def play_all(
    kinds: Sequence[str], times: int, base: Path, nodes: int, seed: int = 1, first: int = 0
) -> list[dict[str, Any]]:
    """All kinds side by side, on as many clusters as they need."""
    made = make_checkpoints(base / "made")
    shared = [kind for kind in kinds if kind not in OWN_CLUSTER]
    groups = ([shared] if shared else []) + [[kind] for kind in kinds if kind in OWN_CLUSTER]
    clusters = []
    try:
        for number, _ in enumerate(groups, first):
            clusters.append(Cluster(base / f"cluster-{number}", number=number, nodes=nodes))
            clusters[-1].up()
        pairs = [(kind, cluster) for cluster, group in zip(clusters, groups, strict=True) for kind in group]
        with ThreadPoolExecutor(len(pairs)) as pool:
            playing = [pool.submit(lambda kind, cluster: Job(kind, cluster, base / kind, made, seed).play(times), kind, cluster)
                       for kind, cluster in pairs]  # fmt: skip
            for one in as_completed(playing):  # each as it ends: a play of them all takes 20 minutes and may be cut
                print(line(one.result()), flush=True)
            return [one.result() for one in playing]
    finally:
        for cluster in clusters:
            cluster.down()


def line(row: dict[str, Any]) -> str:
    """One kind's row of the table."""
    return (f"{row['kind']:<20}{row['times']:>6}{row['went_on']:>9}{row['cut_saves']:>11}{len(row['wrong_resumes']):>15}"
            f"{len(row['false_causes']):>14}{'yes' if row['completed'] else 'no':>10}  {row['seconds']}")  # fmt: skip


def show(rows: Sequence[dict[str, Any]]) -> None:
    """The table."""
    print(
        f"{'interruption':<20}{'times':>6}{'went on':>9}{'cut saves':>11}{'wrong resumes':>15}{'false causes':>14}"
        f"{'finished':>10}  s each"
    )
    for row in rows:
        print(line(row))
    for row in rows:
        if row["why"]:
            print(f"{row['kind']}: {row['why']}")
    print(f"{'all':<20}{sum(row['times'] for row in rows):>6}{sum(row['went_on'] for row in rows):>9}"
          f"{sum(row['cut_saves'] for row in rows):>11}{sum(len(row['wrong_resumes']) for row in rows):>15}"
          f"{sum(len(row['false_causes']) for row in rows):>14}{sum(row['completed'] for row in rows):>10}")  # fmt: skip


def main() -> int:
    """Play what is asked for, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", action="append", default=[], choices=list(TRUE))
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("slurm.json"))
    parser.add_argument(
        "--cluster", type=int, default=0, help="number of the first cluster, where several run on one machine"
    )
    parser.add_argument("--keep", type=Path, help="directory that keeps all files")
    arguments = parser.parse_args()
    if reason := why_not():
        print(f"no SLURM cluster can be started here: {reason}")
        return 2
    base = arguments.keep or Path(tempfile.mkdtemp(prefix="slurm-"))
    try:
        rows = play_all(
            arguments.only or list(TRUE), arguments.times, base, arguments.nodes, arguments.seed, arguments.cluster
        )
    finally:
        if arguments.keep is None:
            shutil.rmtree(base, ignore_errors=True)
    arguments.out.write_text(json.dumps(rows, indent=1))
    show(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())

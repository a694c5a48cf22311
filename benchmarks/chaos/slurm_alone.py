"""The same training and faults under SLURM's requeue alone: one node, a script that asks for its requeue where torchrun fails.

    python -m benchmarks.chaos.slurm_alone [--faults 8] [--seed 1] [--out slurm_alone.json]

Nobody hands over a checkpoint, verifies one or looks for a stand-still: the trainer takes the newest by its number. A person
comes where nothing moves for a minute, where more than three starts in a row did no step (the newest checkpoint is removed),
and where the job has ended.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.chaos.__main__ import SAVE_EVERY, Campaign, play_and_judge
from benchmarks.chaos.faults import Fault, draw
from benchmarks.slurm.cluster import Cluster, why_not
from chronicle.launch.slurm import ask_job

SCRIPT = """\
#!/bin/bash
#SBATCH --requeue --open-mode=append --exclusive --output={out}
cd {directory}
export CHAOS_START=$SLURM_RESTART_COUNT
{command} || scontrol requeue $SLURM_JOB_ID
"""
# one of each class: a process that is killed, a stand-still, an exception, a checkpoint that cannot be resumed from
KINDS = ("kill_rank", "kill_launcher", "collective", "dead_loader", "nan", "truncated", "kill_in_save", "poisoned")
VAIN_STARTS = 3
STILL_SECONDS, START_SECONDS = 60.0, 240.0  # without a step, and before the first one of a start


class SlurmCampaign(Campaign):
    """A campaign whose starts are jobs of a cluster."""

    def __init__(
        self, directory: Path, faults: Sequence[Fault], steps: int, cluster: Cluster, *, pace: float = 0.0
    ) -> None:
        super().__init__(directory, faults, steps, bare=True, pace=pace)
        self.cluster = cluster

    def _start(self) -> None:
        number, before = len(self.starts), len(self.log())
        out, script = self.directory / f"out-{number}.txt", self.directory / "job.sh"
        command = shlex.join([word for word in self._command() if word not in ("--max-restarts", "100")])
        script.write_text(SCRIPT.format(out=out, directory=self.directory, command=command))
        environ = self.environ | {key: self.cluster.environ[key] for key in ("PATH", "SLURM_CONF")}
        words = ["sbatch", "--parsable", str(script)]
        job = subprocess.run(words, env=environ, capture_output=True, text=True, check=True).stdout.strip()
        end = self._watch_job(job)
        self.cluster.ask("scancel", job)
        self._end_all()
        last = max(self.struck().items(), key=lambda one: one[1], default=(None, 0.0))[0]
        progressed = len(self.log()) > before and end != "starts in vain"
        row = {"code": None, "end": end, "fault": last, "said": "", "progressed": progressed}
        self.starts.append(row)
        if not self._finished():
            row["person"] = self._do_as_told(row)

    def _watch_job(self, job: str) -> str:
        """Wait until the job has ended, stands, or starts again and again without a step."""
        begun = len(self.log())
        steps, since, at_step = begun, time.monotonic(), 0
        while True:
            time.sleep(1.0)
            self._free_the_disk()
            word = ask_job(job, now=time.time(), ask=self._ask)
            if word is None:
                continue
            if (count := len(self.log())) != steps or word.state != "RUNNING":
                at_step = word.restarts if count != steps else at_step
                steps, since = count, time.monotonic()
            if word.state not in ("RUNNING", "PENDING", "COMPLETING", "CONFIGURING", "REQUEUED"):
                return "ended"
            if word.restarts - at_step > VAIN_STARTS:
                return "starts in vain"
            if time.monotonic() - since > (STILL_SECONDS if at_step == word.restarts and count > begun else START_SECONDS):
                return "stands"

    def _ask(self, words: Sequence[str]) -> tuple[int, str] | None:
        done = subprocess.run(words, env=self.cluster.environ, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr


def main() -> int:
    """Play the faults, print the table, write one JSON; 1 where there can be no cluster."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--faults", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("slurm_alone.json"))
    arguments = parser.parse_args()
    if reason := why_not():
        print(f"no SLURM here: {reason}")
        return 1
    faults = draw(arguments.faults, arguments.seed, SAVE_EVERY, (40, 80), KINDS)
    steps = faults[-1].step + 2 * SAVE_EVERY
    result: dict[str, Any] = {"seed": arguments.seed, "steps": steps}
    where = Path(tempfile.mkdtemp(prefix="chaos-"))
    cluster = Cluster(where / "cluster", number=8, nodes=1)
    try:
        reference = play_and_judge(Campaign(where / "undisturbed", (), steps), "undisturbed", (), result)
        campaign = SlurmCampaign(where / "slurm", faults, steps, cluster)  # mounts its disk, before the nodes are unshared
        try:
            cluster.up()
        except BaseException:
            campaign.close()
            raise
        play_and_judge(campaign, "slurm", reference, result)
    finally:
        cluster.down()
        shutil.rmtree(where, ignore_errors=True)
    arguments.out.write_text(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

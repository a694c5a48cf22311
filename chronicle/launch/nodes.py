"""A node of a launch over several: who it is, which launch the nodes share, and what each says to the others.

A node is a task of SLURM's `srun`, or a pod of an Indexed Job, a JobSet or a training operator. Its number and its job come
from the scheduler's variables; what they do not say is asked for and never guessed. All else is said by files in the run's
directory, which the nodes share.

Whoever starts the nodes starts all of them for one launch, and all of them again for the next one: SLURM's batch script, or a
JobSet. A node that comes back alone is refused.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from chronicle.errors import UsageProblem
from chronicle.journal.events import EndCause
from chronicle.paths import RunPaths
from rollback.disk.durable import write_atomic


class Node(NamedTuple):
    """One node's part in a launch. `key`: what its nodes share and no other launch has."""

    key: str
    number: int


# Each says how many nodes come before this one. RANK is a node's where the Training Operator sets it: no rank runs yet.
NUMBERS = ("CHRONICLE_NODE", "PET_NODE_RANK", "JOB_COMPLETION_INDEX", "RANK")
JOB = "CHRONICLE_JOB"
JOB_HINT = (
    f"give all pods of the job the same {JOB}, which no other job has: the label "
    "`batch.kubernetes.io/controller-uid` (examples/kubernetes/jobset-two-pods.yaml)"
)


def find_node(environ: Mapping[str, str]) -> Node:
    """This node by its scheduler's variables. Raises `UsageProblem` where they do not say its number or its job."""
    job, node = environ.get("SLURM_JOB_ID"), environ.get("SLURM_NODEID", "")
    if job and node.isdecimal():
        restart, step = environ.get("SLURM_RESTART_COUNT") or "0", environ.get("SLURM_STEP_ID") or "0"
        return Node(f"{job}.{restart}.{step}", int(node))
    told = {name: environ[name] for name in NUMBERS if environ.get(name)}
    job = environ.get(JOB, "")
    if not told:
        known = f"{JOB} is set, this node's number is not" if job else "nothing says which node of which job this is"
        raise UsageProblem(
            f"--node: {known}: expected SLURM_JOB_ID and SLURM_NODEID, or one of {', '.join(NUMBERS)}",
            "start it with `srun`, one task per node, or in a Job with `completionMode: Indexed`",
        )
    name, number = next(iter(told.items()))
    if not number.isdecimal():
        raise UsageProblem(f"--node: {name} is `{number}`: expected the number of this node, from 0")
    if not job:
        raise UsageProblem(f"--node: this is node {number} ({name}), of which job is not known", JOB_HINT)
    if re.fullmatch(r"[\w.-]{1,120}", job) is None:
        raise UsageProblem(f"--node: {JOB} is `{job}`: expected letters, digits, `.`, `_` and `-`", JOB_HINT)
    return Node(job, int(number))


def handed_path(paths: RunPaths, key: str) -> Path:
    """Where the first node of a launch says what to resume from, or why nobody may begin."""
    return paths.launches_dir / f".handed-{key}"


def share_number(paths: RunPaths, key: str, take: Callable[[], int]) -> int:
    """Return one launch number for all nodes that share `key`: the first node links its number, the others read it.

    `link` succeeds for exactly one caller, also on network file systems. A number that was not needed is released.
    """
    paths.launches_dir.mkdir(parents=True, exist_ok=True)
    shared = paths.launches_dir / f".job-{key}"
    known = shared_number(paths, key)
    if known is not None:
        return known
    mine = take()
    try:
        write_atomic(shared, f"{mine}\n", durable=False, may_replace=False)
        return mine
    except FileExistsError:
        paths.launch_dir(mine).rmdir()
        number = _read_number(shared)
        assert number is not None, f"`{shared}` was linked into place with its number in it"
        return number


def shared_number(paths: RunPaths, key: str) -> int | None:
    """The launch number that the nodes of `key` share; None before one of them took it."""
    return _read_number(paths.launches_dir / f".job-{key}")


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (FileNotFoundError, ValueError):
        return None


LOOK_SECONDS = 5.0
AFTER_FAILURE_SECONDS = 60.0


class Peers:
    """What the other nodes of one launch have said, by files in the launch's directory.

    The batch script lets every node finish its save (`srun --kill-on-bad-exit=0 --wait=0`), so each supervisor ends its own
    part some time after another one failed. A node whose peer crashed has a minute: its ranks fail by themselves in that
    time, and their own last lines are worth more than a TERM. After a peer that was told to stop, this node was told too;
    it gets its whole grace period first.
    """

    def __init__(
        self, directory: Path, node: int, grace_seconds: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._directory, self._node, self._grace, self._clock = directory, node, grace_seconds, clock
        self._next_look = 0.0
        self._first_seen: dict[str, float] = {}
        self.said = ""  # how the peer ended that ends this part too

    def tell(self, data: Mapping[str, Any]) -> None:
        """Say how this node's part ended. Raises `OSError`."""
        said = {"host": data.get("host"), "exit_code": data.get("exit_code"), "stopped": data.get("stopped_by") == "signal"}
        said |= {"cause": data.get("cause"), "because": data.get("because")}
        write_atomic(self._place(self._node), json.dumps(said), durable=False)

    def _place(self, node: int) -> Path:
        return self._directory / f".ended-node{node}.json"

    def have_failed(self) -> bool:
        """Whether a peer ended badly so long ago that this part ends too."""
        now = self._clock()
        if now < self._next_look:
            return False
        self._next_look = now + LOOK_SECONDS
        for path in sorted(self._directory.glob(".ended-node*.json")):
            said = _read_json(path)
            ended_itself = said.get("cause") in (EndCause.FINISHED, EndCause.ENDED, EndCause.EARLY)
            if not said or ended_itself or path == self._place(self._node):
                continue
            since = self._first_seen.setdefault(path.name, now)
            patience = AFTER_FAILURE_SECONDS + (self._grace if said.get("stopped") else 0.0)
            if now - since >= patience:
                self.said = f"node {said.get('host')} ended: {said.get('cause')} ({said.get('because')})"
                return True
        return False


def _read_json(path: Path) -> Mapping[str, Any]:
    """{} where there is no such file, or it is being written."""
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}

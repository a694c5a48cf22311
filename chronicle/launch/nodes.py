"""A node of a launch over several: who it is, which launch the nodes share, and what each says to the others.

A node is a task of SLURM's `srun`, or a pod of an Indexed Job, a JobSet or a training operator. Its number and its job come
from the scheduler's variables; what they do not say is asked for and never guessed. All else is said by files in the run's
directory, which the nodes share.

Under SLURM a batch script stands above the nodes: it starts all of them for one launch, and decides when all have ended. Above
pods stands nobody who could: each is replaced alone. There the first node numbers the launches of the job (rounds). It ends and
decides, then hands over the next one; the others wait for a round that they have not joined. A pod that stands in for another
one says so, and the rest of that launch ends.
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
    """One node's part in a launch. `key`: what its nodes share and no other launch has; of pods first only their job's."""

    key: str
    number: int
    in_rounds: bool = False  # pods: nobody outside of them decides whether the next launch begins


# Each says how many nodes come before this one. RANK is a node's where the Training Operator sets it: no rank runs yet.
NUMBERS = ("CHRONICLE_NODE", "PET_NODE_RANK", "JOB_COMPLETION_INDEX", "RANK")
JOB, POD = "CHRONICLE_JOB", "CHRONICLE_POD"
JOB_HINT = (
    f"give all pods of the job the same {JOB}, which no other job has: the label "
    "`batch.kubernetes.io/controller-uid` (examples/kubernetes/indexed-job.yaml)"
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
    return Node(job, int(number), in_rounds=True)


class Rounds:
    """The launches of a job of pods, one after the other, as files beside the launches.

    `.handed-<job>.<round>`        the first node: this launch may begin, from there; or why none may
    `.joined-<job>.<round>-<n>`    node n takes part
    """

    def __init__(self, paths: RunPaths, node: Node) -> None:
        self._paths, self._node = paths, node

    def handed(self) -> int:
        """The newest round that the first node handed over; 0 for none."""
        return self._newest(f".handed-{self._node.key}.", "")

    def joined(self) -> int:
        """The newest round that this node, or the pod before it, took part in; 0 for none."""
        return self._newest(f".joined-{self._node.key}.", f"-{self._node.number}")

    def join(self, number: int) -> None:
        """Take part."""
        path = self._paths.launches_dir / f".joined-{self._node.key}.{number}-{self._node.number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    def part(self, number: int) -> Node:
        """This node in that round."""
        return self._node._replace(key=f"{self._node.key}.{number}")

    def _newest(self, before: str, after: str) -> int:
        names = (path.name for path in self._paths.launches_dir.glob(f"{before}*{after}"))
        numbers = (name.removeprefix(before).removesuffix(after) for name in names)
        return max((int(one) for one in numbers if one.isdecimal()), default=0)


def handed_path(paths: RunPaths, key: str) -> Path:
    """Where the first node of a launch says what to resume from, or why nobody may begin."""
    return paths.launches_dir / f".handed-{key}"


def has_passed(paths: RunPaths, part: Node) -> bool:
    """Whether the first node has handed over a later round than this part's."""
    job, _, number = part.key.rpartition(".")
    return part.in_rounds and Rounds(paths, part._replace(key=job)).handed() > int(number)


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
    it gets its whole grace period first. Where a peer's pod was replaced, or another round has begun, nobody is waited for.
    """

    def __init__(
        self, directory: Path, node: int, grace_seconds: float, *, clock: Callable[[], float] = time.monotonic,
        is_past: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        """`is_past()`: whether the nodes have gone on to another launch."""
        self._directory, self._node, self._grace, self._clock, self._is_past = directory, node, grace_seconds, clock, is_past
        self._next_look = 0.0
        self._first_seen: dict[str, float] = {}
        self.said = ""  # how the peer ended that ends this part too

    def tell(self, data: Mapping[str, Any]) -> None:
        """Say how this node's part ended. Raises `OSError`."""
        said = {"host": data.get("host"), "exit_code": data.get("exit_code"), "stopped": data.get("stopped_by") == "signal"}
        said |= {"cause": data.get("cause"), "because": data.get("because"), "replaced": bool(data.get("replaced"))}
        write_atomic(self._place(self._node), json.dumps(said), durable=False)

    def told_by(self, node: int) -> Mapping[str, Any]:
        """How that node's part ended; {} where it has not said so."""
        return _read_json(self._place(node))

    def _place(self, node: int) -> Path:
        return self._directory / f".ended-node{node}.json"

    def have_failed(self) -> bool:
        """Whether a peer ended badly so long ago that this part ends too."""
        now = self._clock()
        if now < self._next_look:
            return False
        self._next_look = now + LOOK_SECONDS
        if self._is_past():
            self.said = "the first node has begun another launch"
            return True
        for path in sorted(self._directory.glob(".ended-node*.json")):
            said = _read_json(path)
            if not said or said.get("cause") in (EndCause.FINISHED, EndCause.EARLY) or path == self._place(self._node):
                continue
            since = self._first_seen.setdefault(path.name, now)
            patience = AFTER_FAILURE_SECONDS + (self._grace if said.get("stopped") else 0.0)
            if said.get("replaced") or now - since >= patience:
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

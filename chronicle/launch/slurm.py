"""SLURM: one launch over many nodes, and a batch script that saves before the limit and requeues.

On N nodes `srun` starts one `chronicle run --node` each: one launch number for all of them, taken by whoever comes first;
each keeps its own journal writer, heartbeat and supervisor. The launch is recognised by job, restart count and step.
"""

from __future__ import annotations

import math
import os
import secrets
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from chronicle.paths import RunPaths

__all__ = ["NodeIdentity", "format_sbatch", "node_identity", "share_number"]

SIGNAL_MARGIN_SECONDS = 30  # between the end of the grace and SLURM's own KILL
NodeIdentity = tuple[str, int]  # (what all nodes of one launch share, number of this node)

TEMPLATE = """\
#!/bin/bash
#SBATCH --job-name={run}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
# Warn the steps (not this shell) early enough for a save: {grace:.0f} s of grace and a margin.
#SBATCH --signal=USR1@{lead:d}
{exclude}
export CHRONICLE_SIGNAL_LEAD={lead:d}
# One supervisor a node; torchrun itself starts the ranks of its node.
srun --kill-on-bad-exit=1 --wait=60 --unbuffered \\
  chronicle run --run {run}{node_flag} --grace {grace:.0f} -- {command}
code=$?
# 138: ended by USR1, saved, not finished. 78: the guard refused, starting again would be refused again.
if [ "$code" -eq 138 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def node_identity(environ: Mapping[str, str]) -> NodeIdentity | None:
    """Which launch and which node of it this process is, from SLURM's variables; None outside a step."""
    job, node = environ.get("SLURM_JOB_ID"), environ.get("SLURM_NODEID", "")
    if not job or not node.isdigit():
        return None
    restart, step = environ.get("SLURM_RESTART_COUNT") or "0", environ.get("SLURM_STEP_ID") or "0"
    return f"{job}.{restart}.{step}", int(node)


def share_number(paths: RunPaths, key: str, take: Callable[[], int]) -> int:
    """One launch number for all nodes that share `key`: the first links its number into place, the others read it.

    `link` succeeds for exactly one caller, on network file systems too. A number taken in vain is given back.
    """
    paths.launches_dir.mkdir(parents=True, exist_ok=True)
    shared = paths.launches_dir / f".job-{key}"
    known = _read_number(shared)
    if known is not None:
        return known
    mine = take()
    temporary = shared.with_name(f"{shared.name}.{secrets.token_hex(4)}")
    temporary.write_text(f"{mine}\n", encoding="ascii")
    try:
        os.link(temporary, shared)
        return mine
    except FileExistsError:
        paths.launch_dir(mine).rmdir()
        number = _read_number(shared)
        assert number is not None, f"`{shared}` was linked into place with its number in it"
        return number
    finally:
        temporary.unlink()


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (FileNotFoundError, ValueError):
        return None


def format_sbatch(
    run: str, command: Sequence[str], *, grace_seconds: float, nodes: int = 1, excluded: Sequence[str] = ()
) -> str:
    """A batch script for this run; SLURM's warning comes `grace + 30` seconds before its limit."""
    return TEMPLATE.format(
        run=shlex.quote(run),
        nodes=nodes,
        grace=grace_seconds,
        lead=math.ceil(grace_seconds) + SIGNAL_MARGIN_SECONDS,
        exclude=f"#SBATCH --exclude={','.join(excluded)}\n" if excluded else "",
        node_flag=" --node" if nodes > 1 else "",
        command=shlex.join(command),
    )

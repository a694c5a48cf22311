"""What is said when a launch has ended: how, who ended first, the last lines of that rank, what was cleaned up.

Pure: takes the outcome and the logs' tails, returns the entry's `data` and the text for people.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from chronicle.journal import Journal
from chronicle.launch.supervisor import Outcome

__all__ = ["DO_NOT_REQUEUE", "describe_end", "format_end", "title_of_end", "was_refused"]

DO_NOT_REQUEUE = 78

TAIL_LINES = 12
TORCHRUN_RANK = re.compile(r"\brank\s*: (\d+) \(local_rank: \d+\)")
TORCHRUN_CODE = re.compile(r"\bexitcode\s*: (-?\d+) \(pid: \d+\)")


def describe_end(
    outcome: Outcome,
    *,
    host: str,
    last_step: int | None,
    tails: Mapping[int, Sequence[str]],
    launcher_tail: Sequence[str],
    lost_bytes: int,
    late: Mapping[int, float | None],
    explained: bool = False,
) -> dict[str, Any]:
    """The `data` of `launch.end`. `tails` are the last lines by rank, `launcher_tail` those of the merged log.

    `explained`: the guard or a proposal has already said why; the launcher's traceback would only hide it.
    """
    failed = outcome.exit_code != 0 and not explained
    death = outcome.first_death if failed else None
    data: dict[str, Any] = {
        "host": host,
        "exit_code": outcome.exit_code,
        "signal": outcome.signal,
        "last_step": last_step,
        "duration_seconds": round(outcome.duration_seconds, 3),
        "launcher_code": outcome.launcher_code,
        "stopped_by": outcome.stopped_by,
        "stop_signal": outcome.stop_signal,
        "ended_processes": {
            "terminated": outcome.ended.terminated,
            "killed": outcome.ended.killed,
            "left": [process.pid for process in outcome.ended.left],
        },
    }
    if death is not None:
        before = max(0.0, outcome.launcher_ended_at - death.time)
        data["first_to_end"] = {"rank": death.rank, "pid": death.pid, "seconds_before_launcher": round(before, 3)}
        code = find_rank_code(launcher_tail, death.rank)
        if code is not None:
            data["first_to_end"]["exit_code"] = code
    if failed:
        tail = tails.get(death.rank) if death is not None else None
        data["tail"] = list(tail or launcher_tail)[-TAIL_LINES:]
        data["tail_of"] = f"rank {death.rank}" if death is not None and tail else "launcher"
    if lost_bytes:
        data["log_bytes_lost"] = lost_bytes
    if late:
        data["buffered_ranks"] = {str(rank): seconds for rank, seconds in sorted(late.items())}
    return data


def was_refused(journal: Journal, launch: int, launcher_tail: Sequence[str]) -> bool:
    """Whether guard or preflight of this launch refused it (a rank ended with 78): requeueing would only be refused again."""
    verdicts = [entry for entry in journal.of_kind("guard.verdict") if entry.launch == launch]
    if verdicts and verdicts[-1].data.get("verdict") == "refused":
        return True
    codes = (TORCHRUN_CODE.search(line) for line in launcher_tail)
    return any(code is not None and int(code.group(1)) == DO_NOT_REQUEUE for code in codes)


def find_rank_code(lines: Sequence[str], rank: int) -> int | None:
    """The exit code torchrun's own report gives for this rank: `rank : 1 (local_rank: 1)`, `exitcode : -9 (pid: …)`."""
    current = None
    for line in lines:
        named = TORCHRUN_RANK.search(line)
        if named is not None:
            current = int(named.group(1))
        code = TORCHRUN_CODE.search(line)
        if code is not None and current == rank:
            return int(code.group(1))
    return None


def title_of_end(launch: int, data: Mapping[str, Any]) -> str:
    """One line for `chronicle log`."""
    if data["stopped_by"] == "proposal":
        how = "stopped on a proposal"
    elif data["stopped_by"] == "signal" and data.get("launcher_code") == 0:
        how = f"saved and ended on {data['stop_signal']}"
    elif data["signal"]:
        how = f"ended by {data['signal']}"
    else:
        how = "completed" if data["exit_code"] == 0 else "failed"
    at = "" if data["last_step"] is None else f" at step {data['last_step']}"
    return f"launch {launch} {how}{at}"


def format_end(launch: int, data: Mapping[str, Any], *, containment: str) -> list[str]:
    """Lines for the terminal; one line when all is well."""
    ended = data["ended_processes"]
    counts = ", ".join(f"{ended[key]} {word}" for key, word in (("terminated", "TERM"), ("killed", "KILL")) if ended[key])
    lines = [f"{title_of_end(launch, data)}, after {data['duration_seconds']:.1f} s, exit code {data['exit_code']}"]
    first = data.get("first_to_end")
    if first is not None:
        before = first["seconds_before_launcher"]
        code = f", exit code {first['exit_code']}" if "exit_code" in first else ""
        who = f"rank {first['rank']} (pid {first['pid']}{code})"
        lines.append(f"first to end: {who}, {before:.1f} s before the launcher")
    if data.get("tail"):
        lines.append(f"last lines of {data['tail_of']}:")
        lines += [f"  {line}" for line in data["tail"]]
    if counts:
        lines.append(f"ended what was left: {counts} (containment: {containment})")
    if ended["left"]:
        lines.append(f"still alive, stuck in the kernel: {', '.join(map(str, ended['left']))}")
    if data.get("log_bytes_lost"):
        lines.append(f"{data['log_bytes_lost']} bytes of logs could not be written")
    if data.get("buffered_ranks"):
        lines.append(f"output of rank {', '.join(data['buffered_ranks'])} was buffered on its way here")
    return lines

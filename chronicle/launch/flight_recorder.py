"""Dumps of PyTorch's flight recorder, which `torchfrtrace` reads: at which collective each rank is, and which one is behind.

A rank writes `<prefix><rank>` when its watchdog times out, or when something writes to its dump pipe: pickles of dictionaries,
lists, texts and numbers. They are read by an unpickler that builds nothing else. Nothing is triggered here; dumps that another
launch left are older than this one and not read. Names and fields: `FlightRecorder.hpp`, `DebugInfoWriter` of PyTorch.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Collective", "find_dumps", "read_dump", "read_recorders"]

VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
DEFAULTS = ("/tmp/nccl_trace_rank_", "~/.cache/torch/comm_lib_trace_rank_")
LARGEST_BYTES = 256 << 20


class Collective(NamedTuple):
    """The newest collective of one process group on one rank."""

    rank: int
    group: str
    number: int
    name: str
    state: str  # scheduled, started, completed


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"a flight recorder's dump holds no {module}.{name}")


def find_dumps(environ: Mapping[str, str], newer_than: float) -> dict[int, Path]:
    """By rank: the dumps that were written since `newer_than` (seconds since the epoch)."""
    found: dict[int, Path] = {}
    for prefix in [*(environ[name] for name in VARIABLES if environ.get(name)), *map(os.path.expanduser, DEFAULTS)]:
        folder, start = os.path.split(prefix)
        try:
            names = [name for name in os.listdir(folder or ".") if name.startswith(start)]
        except OSError:
            continue
        for name in names:
            path, rank = Path(folder, name), name[len(start) :]
            if rank.isdigit() and int(rank) not in found and path.is_file() and path.stat().st_mtime >= newer_than:
                found[int(rank)] = path
    return found


def read_dump(rank: int, path: Path) -> list[Collective]:
    """The newest collective of each group in this dump. Raises `OSError`, `ValueError` for what is no such dump."""
    with open(path, "rb") as file:
        data = file.read(LARGEST_BYTES)
    try:
        dump = _Plain(io.BytesIO(data)).load()
        newest: dict[str, Collective] = {}
        for entry in dump["entries"]:
            group, number = str(entry["process_group"][0]), int(entry["collective_seq_id"])
            if not entry.get("is_p2p") and (group not in newest or number >= newest[group].number):
                newest[group] = Collective(rank, group, number, str(entry["profiling_name"]), str(entry["state"]))
    except Exception as problem:  # a pickle can raise anything
        raise ValueError(f"`{path}` is no dump of a flight recorder: {type(problem).__name__}: {problem}") from problem
    return list(newest.values())


def read_recorders(environ: Mapping[str, str], newer_than: float = 0.0) -> list[str]:
    """Lines that say which ranks are behind in which group; [] without dumps."""
    by_group: dict[str, list[Collective]] = {}
    lines = []
    for rank, path in sorted(find_dumps(environ, newer_than).items()):
        try:
            for one in read_dump(rank, path):
                by_group.setdefault(one.group, []).append(one)
        except (OSError, ValueError) as problem:
            lines.append(f"flight recorder: {problem}")
    for group, ones in sorted(by_group.items()):
        lines += _compare(group, ones)
    return lines


def _compare(group: str, ones: Sequence[Collective]) -> list[str]:
    last = max(one.number for one in ones)
    at = {(one.number, one.name, one.state): [other.rank for other in ones if other[2:] == one[2:]] for one in ones}
    if len(at) == 1 and all(one.state == "completed" for one in ones):
        return []
    said = [
        f"rank {', '.join(map(str, ranks))} at {number} ({name}, {state}{', behind' if number < last else ''})"
        for (number, name, state), ranks in sorted(at.items())
    ]
    return [f"flight recorder, group {group}: {'; '.join(said)}"]

"""What a rank calls to get its own log: `open_rank_output()`, by the guard or by the trainer, before the first line.

The rank's stdout and stderr become a socket to the supervisor on the same node, which writes `rank-<r>.log` and shows
the lines. A socket and not a file: a full log disk then costs log lines, never a `print` that raises in the trainer.
Without `chronicle run`, or where the socket cannot be reached, nothing changes. Standard library only.
"""

from __future__ import annotations

import io
import json
import os
import socket
import sys
from collections.abc import Mapping

__all__ = ["OUTPUT_VARIABLE", "open_rank_output", "rank_of"]

OUTPUT_VARIABLE = "CHRONICLE_OUTPUT"
RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
LATENCY_MARK = "\x1e"  # ASCII record separator: starts the one line that measures how late output arrives


def rank_of(environ: Mapping[str, str]) -> int | None:
    """This process's global rank as launchers tell it, or None for a process outside any group."""
    for name in RANK_VARIABLES:
        if environ.get(name, "").isdigit():
            return int(environ[name])
    return None


def open_rank_output(
    rank: int | None = None, *, environ: Mapping[str, str] = os.environ, redirect: bool = True
) -> bool:
    """Send stdout and stderr of this process to the supervisor as this rank's own; True when that is so.

    Also sets both to line buffering without write-through: `python -u` writes one `print` in pieces, and lines of
    several ranks then tear each other (measured: 4,672 of 6,000). With `redirect=False` output stays where the launcher
    put it and only the latency test is made: one marked line, printed and not flushed, whose arrival is timed.
    """
    if redirect:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(line_buffering=True, write_through=False)
    address = environ.get(OUTPUT_VARIABLE)
    if not address:
        return False
    number = rank if rank is not None else rank_of(environ)
    return _connect(address, 0 if number is None else number, environ, redirect)


def _connect(address: str, rank: int, environ: Mapping[str, str], redirect: bool) -> bool:
    mark = os.urandom(8).hex()
    hello = {"v": 1, "rank": rank, "pid": os.getpid(), "world_size": environ.get("WORLD_SIZE")}
    hello |= {"redirect": redirect, "latency": mark}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        try:
            line.connect(address.replace("@", "\0", 1) if address.startswith("@") else address)
            line.sendall(json.dumps(hello).encode() + b"\n")
        except OSError:
            return False  # another network namespace, or the supervisor is gone: keep what the launcher gave us
        sys.stdout.flush()
        sys.stderr.flush()
        if redirect:
            os.dup2(line.fileno(), 1)
            os.dup2(line.fileno(), 2)
    print(f"{LATENCY_MARK}latency {mark}")
    return redirect

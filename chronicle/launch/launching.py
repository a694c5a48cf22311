"""Admission of a launch: may it start, under which number; then it runs to its end.

    refuse? -> launches/<nnnn>/ -> launch.start -> supervisor -> launch.end -> heartbeat removed
"""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable
from dataclasses import replace

from chronicle.errors import JournalError
from chronicle.journal import JournalWriter, read_journal
from chronicle.journal.anchors import anchor_heads
from chronicle.launch.admission import (
    LaunchRefused,
    close_lost_launches,
    ensure_node_in_use,
    ensure_startable,
    hold_admission,
)
from chronicle.launch.numbers import take_number
from chronicle.launch.one_launch import Launch
from chronicle.launch.request import LaunchEnd, LaunchRequest
from chronicle.launch.slurm import share_number
from chronicle.launch.watching import LiveDetector

__all__ = ["LaunchEnd", "LaunchRequest", "launch"]


def launch(
    request: LaunchRequest,
    *,
    live_watch: Callable[..., LiveDetector] | None = None,
    clock: Callable[[], float] = time.time,
) -> LaunchEnd:
    """Run one launch to its end. Raises `LaunchRefused` when nothing was started."""
    paths = request.paths
    if shutil.which(request.command[0], path=request.environ.get("PATH")) is None:
        raise LaunchRefused(f"`{request.command[0]}` is not an executable on the PATH", "activate its environment first")
    with hold_admission(paths):
        one = _admit(request, live_watch, clock)
        one.enter()
    return one.run()


def _admit(
    request: LaunchRequest, live_watch: Callable[..., LiveDetector] | None, clock: Callable[[], float]
) -> Launch:
    paths = request.paths
    journal = read_journal(paths)
    ensure_node_in_use(journal, force=request.force)
    if request.node is None:
        ensure_startable(paths, journal, now=clock(), force=request.force)
        number = take_number(paths)
    else:  # the other nodes of this very launch may be running already
        number = share_number(paths, request.node[0], lambda: take_number(paths))
        ensure_startable(paths, journal, now=clock(), force=request.force, own=number)
    request = replace(request, recorded={**request.recorded, "journal_heads": anchor_heads(journal)})
    writer = JournalWriter(paths)
    try:
        close_lost_launches(paths, journal, writer)
    except JournalError:
        pass  # said below, with the first entry of this launch
    return Launch(request, number, secrets.token_hex(16), writer, live_watch, clock)

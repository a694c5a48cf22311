"""`chronicle hardware` records hardware events; `chronicle hardware --exclude` excludes a node from later launches."""

import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from chronicle.audit.hardware import HardwareEvent, find_step, guess_year, parse_kernel_log, parse_nvidia_smi
from chronicle.cli.options import IN_RUN, CommandResult, InRun
from chronicle.errors import UsageProblem
from chronicle.journal import Entry, JournalWriter, read_journal
from chronicle.journal.events import Hardware, LaunchStart, events_of
from chronicle.launch.admission import EXCLUDE, READMIT, find_ever_excluded, find_excluded
from chronicle.launch.provenance import host_name
from chronicle.launch.slurm import exclude_from_job, start_of
from chronicle.paths import RunPaths

QUERY_SECONDS = 20.0
NODE = re.compile(r"\w[\w.-]*")


def hardware(
    files: list[Path] | None = None,
    year: int | None = None,
    exclude: str | None = None,
    readmit: str | None = None,
    excluded: bool = False,
    reason: str = "",
    at: InRun = IN_RUN,
) -> CommandResult:
    """Record hardware events; exclude a node, or readmit it.

    The events are read from kernel logs and nvidia-smi; new ones are recorded at the step at which they happened.

    Example: chronicle hardware /var/log/kern.log

    A node that later launches leave out: chronicle hardware --exclude ip-26-0-147-135 --reason "Xid 64"

    Options:
      FILES: Kernel logs or output of `nvidia-smi -q`; `-` is stdin [this machine].
      --year: Year of lines without one [the run's].
      --exclude NODE: Exclude this node from later launches.
      --readmit NODE: Use this node again.
      --excluded: List the excluded nodes in the form of SLURM's --exclude.
      --reason TEXT: Why, for the journal.
    """
    if sum(map(bool, (files, exclude, readmit, excluded))) > 1:
        raise UsageProblem("files, --exclude, --readmit and --excluded: expected only one of them")
    if exclude is not None or readmit is not None:
        return exclude_node(exclude or readmit or "", reason, readmit=readmit is not None, at=at)
    paths = at.settings().paths
    entries = read_journal(paths).entries
    if excluded:
        hosts = find_excluded(entries)
        return CommandResult(lines=",".join(hosts), data={"excluded": hosts})
    used_year = year or guess_year(paths, datetime.now(UTC))
    texts: list[tuple[str, str | None]] = [(_read(path), None) for path in files or ()]
    if not files:  # the kernel log and `nvidia-smi -q` of this machine
        texts = [(_printed(*words), host_name()) for words in (("dmesg", "--time-format", "iso"), ("nvidia-smi", "-q"))]
    events = []
    for text, host in texts:
        events += parse_kernel_log(text.splitlines(), year=used_year, host=host) + parse_nvidia_smi(text, host=host)
    known = {found.key for _, found in events_of(entries, Hardware)}
    fresh = list({event.key: event for event in events if event.key[:600] not in known}.values())
    lines: list[str] = []
    written = []
    if fresh:
        with JournalWriter(paths) as writer:
            for event in fresh:
                told, data = _record(paths, writer, event)
                lines += told
                written.append(data)
    talk = (f"{len(events)} events read, {len(fresh)} new",)
    return CommandResult(lines=lines or "no new hardware event", data={"new": written, "read": len(events)}, talk=talk)


def _record(paths: RunPaths, writer: JournalWriter, event: HardwareEvent) -> tuple[list[str], dict[str, Any]]:
    place = None if event.time is None else find_step(paths, event.time)
    launch, step = place or (None, None)
    entry = writer.write(Hardware.from_json(event.to_json()), step=step, launch=launch, title=event.title)
    where = "outside all launches" if place is None else f"launch {launch}, step {step}"
    hint = [f"      hint: chronicle hardware --exclude {event.host}"] if event.serious and event.host else []
    return [f"{entry.id}  {event.title} · {where}", *hint], {"id": entry.id, "step": step, "launch": launch, **event.to_json()}


def _read(path: Path) -> str:
    try:
        return sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageProblem(f"cannot read `{path}`: {error.strerror or error}") from error


def _printed(*command: str) -> str:
    """What a command of this machine prints; "" where it is not there or does not answer."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=QUERY_SECONDS, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def exclude_node(host: str, reason: str, *, readmit: bool, at: InRun) -> CommandResult:
    """Exclude a node from later launches, or readmit it; a job that waits in SLURM's queue is told."""
    if NODE.fullmatch(host) is None:
        raise UsageProblem(f"`{host}` is no name of a node: expected letters, digits, `.`, `_`, `-`")
    paths = at.settings().paths
    if readmit and host not in find_excluded(read_journal(paths).entries):
        raise UsageProblem(f"`{host}` is not excluded", "`chronicle hardware --excluded` lists the excluded nodes")
    data: dict[str, Any] = {"action": READMIT if readmit else EXCLUDE, "host": host, "reason": reason}
    words = f"{'readmitted' if readmit else 'excluded'} {host}" + (f": {reason}" if reason else "")
    with JournalWriter(paths) as writer:
        entry = writer.write(Hardware.from_json(data), title=words)
    told = _tell_the_scheduler(read_journal(paths).entries)
    return CommandResult(lines=[f"{entry.id}  {words}", *told], data={"id": entry.id, **data, "scheduler": told})


def _tell_the_scheduler(entries: Sequence[Entry]) -> list[str]:
    """Give a job of this run that waits in SLURM's queue its `ExcNodeList`; what was done.

    A running job gets it at its requeue.
    """
    jobs = [start_of(start.environment) for _, start in events_of(entries, LaunchStart)]
    if not jobs or jobs[-1] is None:
        return []
    job = jobs[-1].job
    problem = exclude_from_job(job, tuple(find_excluded(entries)), find_ever_excluded(entries))
    return [f"job {job} waits, and has the list now" if not problem else f"the list is not in SLURM's queue yet: {problem}"]

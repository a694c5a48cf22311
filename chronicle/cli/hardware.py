"""`chronicle hardware` records hardware events; `chronicle hardware --exclude` excludes a node from later launches."""

import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from chronicle.audit.hardware import HardwareEvent, find_step, guess_year, parse_kernel_log, parse_nvidia_smi
from chronicle.cli.options import IN_RUN, CommandResult, InRun
from chronicle.errors import UsageProblem
from chronicle.journal import JournalWriter, read_journal
from chronicle.journal.entries import Entry
from chronicle.journal.events import Hardware, LaunchStart, events_of
from chronicle.launch.admission import EXCLUDE, READMIT, find_ever_excluded, find_excluded
from chronicle.launch.provenance import host_name
from chronicle.launch.slurm import exclude_from_job, start_of
from chronicle.paths import RunPaths

QUERY_SECONDS = 20.0


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
    if sum([bool(files), exclude is not None, readmit is not None, excluded]) > 1:
        raise UsageProblem("files, --exclude, --readmit and --excluded: one of them at a time")
    if exclude is not None or readmit is not None or excluded:
        return exclude_node(exclude or readmit, reason, readmit is not None, at)
    paths = at.settings().paths
    used_year = year or guess_year(paths, datetime.now(UTC))
    events = _read_files(files, used_year) if files else _read_machine(used_year)
    known = {found.key for _, found in events_of(read_journal(paths).entries, Hardware)}
    fresh = list({event.key: event for event in events if event.key[:600] not in known}.values())
    lines, written = [], []
    if fresh:
        with JournalWriter(paths) as writer:
            for event in fresh:
                line, data = _record(paths, writer, event)
                lines.append(line)
                written.append(data)
    talk = (f"{len(events)} events read, {len(fresh)} new",)
    text = "\n".join(lines) or "no new hardware event"
    return CommandResult(text=text, data={"new": written, "read": len(events)}, talk=talk)


def _record(paths: RunPaths, writer: JournalWriter, event: HardwareEvent) -> tuple[str, dict[str, Any]]:
    place = None if event.time is None else find_step(paths, event.time)
    launch, step = place if place is not None else (None, None)
    entry = writer.write(Hardware.from_json(event.to_json()), step=step, launch=launch, title=event.title)
    where = "outside all launches" if place is None else f"launch {launch}, step {step}"
    hint = f"\n      hint: chronicle hardware --exclude {event.host}" if event.serious and event.host else ""
    return f"{entry.id}  {event.title} · {where}{hint}", {"id": entry.id, "step": step, "launch": launch, **event.to_json()}


def _read_files(files: list[Path], year: int) -> list[HardwareEvent]:
    events = []
    for path in files:
        try:
            text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise UsageProblem(f"cannot read `{path}`: {error.strerror or error}") from error
        events += _parse(text, year)
    return events


def _parse(text: str, year: int) -> list[HardwareEvent]:
    return parse_kernel_log(text.splitlines(), year=year) + parse_nvidia_smi(text)


def _read_machine(year: int) -> list[HardwareEvent]:
    """Events from the kernel log and `nvidia-smi -q` of this machine, if they can be read."""
    kernel, driver = _printed("dmesg", "--time-format", "iso"), _printed("nvidia-smi", "-q")
    events = parse_kernel_log(kernel.splitlines(), year=year, host=host_name())
    return events + parse_nvidia_smi(driver, host=host_name())


def _printed(*command: str) -> str:
    """What a command of this machine prints; "" where it is not there or does not answer."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=QUERY_SECONDS, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


# --- chronicle hardware --exclude


def exclude_node(host: str | None = None, reason: str = "", readmit: bool = False, at: InRun = IN_RUN) -> CommandResult:
    """Exclude a node from later launches, or readmit it.

    Without a node, the excluded nodes are printed in the form of SLURM's --exclude.

    Example: chronicle hardware --exclude ip-26-0-147-135 --reason "Xid 64"

    Options:
      HOST: The node. Without it, the excluded nodes are listed.
      --reason: Reason.
      --readmit: Use the node again.
    """
    paths = at.settings().paths
    excluded = find_excluded(read_journal(paths).entries)
    if host is None:
        return CommandResult(text=",".join(excluded), data={"excluded": excluded})
    if readmit and host not in excluded:
        raise UsageProblem(f"`{host}` is not excluded", "`chronicle hardware --excluded` lists the excluded nodes")
    data: dict[str, Any] = {"action": READMIT if readmit else EXCLUDE, "host": host, "reason": reason}
    words = f"{'readmitted' if readmit else 'excluded'} {host}" + (f": {reason}" if reason else "")
    with JournalWriter(paths) as writer:
        entry = writer.write(Hardware.from_json(data), title=words)
    told = _tell_the_scheduler(read_journal(paths).entries)
    return CommandResult(text="\n".join([f"{entry.id}  {words}", *told]), data={"id": entry.id, **data, "scheduler": told})


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

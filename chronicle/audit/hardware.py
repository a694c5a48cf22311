"""Hardware events from text: lines of kernel logs and `nvidia-smi -q`, and the step at which each happened.

Xid meanings are from NVIDIA's Xid catalogue; the lines of seed 003 (May 2023, Xid 63 and 64) are the fixtures. A syslog
line has no year: the caller supplies it. No GPU or driver is needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from chronicle.metrics.log import read_metrics
from chronicle.paths import RunPaths, list_launch_numbers

XID = re.compile(r"NVRM: Xid \((?:PCI:)?(?P<device>[0-9A-Fa-f:.]+)\): (?P<xid>\d+)(?:,\s*(?P<detail>.*))?")
# kind, line of the kernel (the words of its drivers), what it means, whether results can no longer be trusted
KERNEL_LINES = (
    ("ecc", r"EDAC (?P<device>\w+): .*\bUE\b", "uncorrectable memory error of the host", True),
    ("nvme", r"nvme (?P<device>\w+): I/O .*timeout", "the disk did not answer in time", True),
    ("mlx5", r"mlx5_core (?P<device>[0-9a-f:.]+).*(?:health compromised|fatal|internal error|[Ll]ink down)",
     "the network card failed or lost its link", True),
    ("amdgpu", r"amdgpu (?P<device>[0-9a-f:.]+): .*(?:GPU reset begin|ring \S+ timeout)", "the GPU was reset", True),
    ("oom-kill", r"(?P<device>)(?:Out of memory|Memory cgroup out of memory): Killed process .*",
     "the kernel ended a process for lack of memory", False),
)  # fmt: skip
SYSLOG = re.compile(r"(?P<month>\w{3})\s+(?P<day>\d{1,2}) (?P<clock>\d{2}:\d{2}:\d{2}) (?P<host>[\w.-]+) kernel:")
ISO = re.compile(
    r"(?P<iso>\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}:\d{2})(?:[.,]\d+)?(?P<zone>Z|[+-]\d{2}:?\d{2})?"
    r"(?:\s+(?P<host>[\w.-]+) kernel:)?"
)
INSTANCE = re.compile(r"on instance: (?P<host>[\w.-]+)")
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")

# (meaning, whether results of this launch can no longer be trusted)
XIDS: dict[int, tuple[str, bool]] = {
    13: ("graphics engine exception: often the program's own fault", False),
    31: ("GPU memory page fault: often the program's own fault", False),
    43: ("the GPU stopped processing", True),
    45: ("preemptive clean-up after an earlier error", False),
    48: ("double-bit ECC error", True),
    61: ("internal micro-controller halt", True),
    62: ("internal micro-controller halt", True),
    63: ("ECC page retirement or row remapping recorded", False),
    64: ("ECC page retirement or row remapping failed to be recorded", True),
    74: ("NVLink error", True),
    79: ("the GPU has fallen off the bus", True),
    92: ("high single-bit ECC error rate", False),
    94: ("contained ECC error", True),
    95: ("uncontained ECC error", True),
    119: ("GSP RPC timeout", True),
    120: ("GSP error", True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareEvent:
    """One hardware event. `time` is as in the log; `xid` is None for other events; `serious`: the device should not be used."""

    kind: str  # "xid", "remapped-rows", or one of `KERNEL_LINES`
    host: str | None
    device: str | None
    time: datetime | None
    xid: int | None
    text: str
    serious: bool
    line: str

    @property
    def title(self) -> str:
        """Return one line for the journal."""
        name = f"Xid {self.xid}" if self.xid is not None else self.kind
        where = f" on {self.host}" if self.host else ""
        return f"{name}{where}: {self.text}"

    @property
    def key(self) -> str:
        """Return a key that is equal when the same event is read twice."""
        return f"{self.kind}|{self.host}|{self.device}|{self.xid}|{self.line.strip()}"

    def to_json(self) -> dict[str, Any]:
        """Return the data of a `hardware` entry."""
        fields = asdict(self)
        del fields["kind"]
        moment = None if self.time is None else self.time.isoformat()
        return {"event": self.kind, **fields, "time": moment, "line": self.line.strip()[:500], "key": self.key[:600]}


def parse_kernel_log(lines: Iterable[str], *, year: int, host: str | None = None) -> list[HardwareEvent]:
    """Parse the hardware lines of a kernel log, or of a mail quoting one, in order. `host` is used for lines without one."""
    return [event for line in lines if (event := _parse_line(line, year, host)) is not None]


def _parse_line(line: str, year: int, host: str | None) -> HardwareEvent | None:
    number: int | None = None
    match = XID.search(line)
    if match is not None:
        kind, number, detail = "xid", int(match["xid"]), (match["detail"] or "").strip(" .,")
        text, serious = XIDS.get(number, ("unknown Xid", True))
        text = f"{text} ({detail})" if detail else text
    else:
        found = ((row, re.search(row[1], line)) for row in KERNEL_LINES)
        row, match = next(((row, match) for row, match in found if match is not None), (None, None))
        if row is None or match is None:
            return None
        kind, _, text, serious = row
    return HardwareEvent(
        kind=kind,
        host=_host(line) or host,
        device=match["device"].lower().rstrip(":") or None,
        time=_time(line, year),
        xid=number,
        text=text,
        serious=serious,
        line=line,
    )


def _host(line: str) -> str | None:
    for pattern in (SYSLOG, INSTANCE, ISO):
        match = pattern.search(line)
        if match is not None and match["host"]:
            return str(match["host"])
    return None


def _time(line: str, year: int) -> datetime | None:
    match = SYSLOG.search(line)
    try:
        if match is not None and match["month"] in MONTHS:
            month = MONTHS.index(match["month"]) + 1
            return datetime.fromisoformat(f"{year:04d}-{month:02d}-{int(match['day']):02d} {match['clock']}")
        match = ISO.search(line)
        return None if match is None else datetime.fromisoformat(match["iso"] + (match["zone"] or ""))
    except ValueError:
        return None


# section of `nvidia-smi -q`, name in it, value, kind, what it means ({0} name, {1} value), serious
SMI_ROWS = (
    ("ECC", r".*Uncorrectable.*", r"[1-9]\d*", "ecc", "{1} uncorrectable errors ({0})", True),
    ("Remapped", r".*", r"[1-9]\d*", "remapped-rows", "{1} rows remapped ({0})", False),
    ("Remapped", r"Pending|Remapping Failure Occurred", r"Yes", "remapped-rows", "{0}: reset the GPU", True),
)


def parse_nvidia_smi(text: str, *, host: str | None = None) -> list[HardwareEvent]:
    """Parse uncorrected ECC errors and remapped rows from `nvidia-smi -q`. Corrected errors are not reported."""
    events: list[HardwareEvent] = []
    device: str | None = None
    section = ""
    for line in text.splitlines():
        gpu = re.match(r"GPU ([0-9A-Fa-f:.]+)\s*$", line)
        if gpu is not None:
            device, section = gpu.group(1).lower(), ""
            continue
        heading = re.match(r"\s{4}(\S[^:]*?)\s*$", line)
        if heading is not None:
            section = heading.group(1)
        pair = re.match(r"\s+(\S[^:]*?)\s*: (.+?)\s*$", line)
        for where, names, values, kind, meaning, serious in SMI_ROWS if pair is not None else ():
            assert pair is not None
            name, value = pair.groups()
            if section.startswith(where) and re.fullmatch(names, name) and re.fullmatch(values, value):
                told = meaning.format(name if value.isdigit() else name.lower(), value)
                events.append(
                    HardwareEvent(
                        kind=kind, host=host, device=device, time=None, xid=None, text=told, serious=serious, line=line
                    )
                )
    return events


# --- The launch and step of a moment


def find_step(paths: RunPaths, moment: datetime) -> tuple[int, int] | None:
    """Return (launch, last step logged before `moment`) of the launch that was running; None when none was."""
    when = _seconds(moment)
    for number in list_launch_numbers(paths):
        before = None
        try:
            for point in read_metrics(paths.metrics_path(number)):
                if point.time is None:
                    continue
                if point.time > when:
                    if before is not None:
                        return number, before
                    break
                before = point.step
        except OSError:
            continue
    return None


def guess_year(paths: RunPaths, now: datetime) -> int:
    """Return the year for syslog lines of this run: that of the first logged step, else this year."""
    for number in list_launch_numbers(paths):
        try:
            for point in read_metrics(paths.metrics_path(number)):
                if point.time is not None:
                    return datetime.fromtimestamp(point.time, UTC).year
        except OSError:
            continue
    return now.year


def _seconds(moment: datetime) -> float:
    """Return seconds since the epoch; a time without a zone is read as UTC."""
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()

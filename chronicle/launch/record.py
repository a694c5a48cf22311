"""What a launch writes to the journal: its entries, the exit report, and the seals of its files.

An entry that cannot be written waits in memory, and the run goes on. A seal is {path below the run, bytes, sha256}.
`broken_seals` hashes the files again and reports every file that differs.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from chronicle.errors import JournalError
from chronicle.journal import Entry, Journal, JournalWriter, read_journal
from chronicle.journal.events import EndCause, GuardVerdict, JournalEvent, LaunchEnd, SealedParts, events_of
from chronicle.launch.ending import Ending
from chronicle.launch.ranks import RankDeath
from chronicle.launch.supervisor import DO_NOT_REQUEUE, LaunchOutcome
from chronicle.paths import RunPaths

T = TypeVar("T")


def contained(complain: Callable[[str], None], what: str, work: Callable[[], T]) -> T | None:
    """Do something that a launch can do without: an error is said and ends nothing."""
    try:
        return work()
    except JournalError:
        return None  # said with the entries of the launch
    except Exception as error:  # noqa: BLE001 the launch matters more than this record
        complain(f"cannot look at {what}: {type(error).__name__}: {error}")
        return None


class LaunchRecord:
    """Journal entries of one launch. An entry that cannot be written waits and is tried again with each later one."""

    def __init__(self, writer: JournalWriter, launch: int, *, complain: Callable[[str], None]) -> None:
        self.writer = writer
        self.launch = launch
        self._complain = complain
        self._waiting: list[tuple[JournalEvent, int | None, str, Sequence[str]]] = []
        self._said = False

    @property
    def waiting(self) -> int:
        """Return the number of entries that are not on disk yet."""
        return len(self._waiting)

    def write(
        self, event: JournalEvent, *, title: str = "", step: int | None = None, refs: Sequence[str] = ()
    ) -> Entry | None:
        """Write the entry; return None when it has to wait."""
        self._waiting.append((event, step, title, refs))
        return self.flush()

    def flush(self) -> Entry | None:
        """Write the waiting entries; return the last one written, None when some still wait."""
        entry: Entry | None = None
        while self._waiting:
            event, step, title, refs = self._waiting[0]
            try:
                entry = self.writer.write(event, launch=self.launch, step=step, title=title, refs=refs)
            except JournalError as error:
                if not self._said:
                    self._complain(f"{error}; the run continues; journal entries are kept in memory until they can be written")
                    self._said = True
                return None
            self._waiting.pop(0)
        return entry


# --- Exit report: how the launch ended

TAIL_LINES = 12
TORCHRUN_RANK = re.compile(r"\brank\s*: (\d+) \(local_rank: \d+\)")
TORCHRUN_CODE = re.compile(r"\bexitcode\s*: (-?\d+) \(pid: \d+\)")


def describe_end(
    outcome: LaunchOutcome,
    *,
    host: str,
    last_step: int | None,
    tails: Mapping[int, Sequence[str]],
    launcher_tail: Sequence[str],
    lost_bytes: int,
    ending: Ending,
    explained: bool = False,
) -> dict[str, Any]:
    """Return the data of `launch.end`. `tails` are the last lines by rank, `launcher_tail` those of the merged log.

    With `explained` the guard or a proposal has already given the reason, so the launcher's traceback is left out.
    """
    failed = outcome.exit_code != 0 and not explained
    death = outcome.first_to_end if failed else None
    data: dict[str, Any] = {
        "host": host,
        "cause": ending.cause.value,
        "because": ending.because,
        "last_step": last_step,
        "duration_seconds": round(outcome.duration_seconds, 3),
        **{name: getattr(outcome, name) for name in ("exit_code", "signal", "launcher_code", "stopped_by", "stop_signal")},
        "ended_processes": {
            "terminated": outcome.ended.terminated,
            "killed": outcome.ended.killed,
            "left": [process.pid for process in outcome.ended.left],
        },
    }
    if death is not None:
        before = max(0.0, outcome.launcher_ended_at - death.time)
        data["first_to_end"] = {"rank": death.rank, "pid": death.pid, "seconds_before_launcher": round(before, 3)}
        code = code_of(death, launcher_tail)
        if code is not None:
            data["first_to_end"]["exit_code"] = code
    if failed:
        tail = tails.get(death.rank) if death is not None else None
        data["tail"] = list(tail or launcher_tail)[-TAIL_LINES:]
        data["tail_of"] = f"rank {death.rank}" if death is not None and tail else "launcher"
    if lost_bytes:
        data["log_bytes_lost"] = lost_bytes
    return data


def refusal_of(journal: Journal, launch: int, launcher_tail: Sequence[str]) -> str:
    """Why guard or preflight refused this launch, so that it must not be requeued; "" where they did not."""
    verdicts = [(entry, event) for entry, event in events_of(journal.entries, GuardVerdict) if entry.launch == launch]
    if verdicts and verdicts[-1][1].verdict == "refused":
        return verdicts[-1][0].title or "the guard refused"
    if any(code == DO_NOT_REQUEUE for _, code in _reported(launcher_tail)):
        return f"a rank ended with code {DO_NOT_REQUEUE}: guard or preflight refused"
    return ""


def _reported(lines: Iterable[str]) -> Iterator[tuple[int | None, int]]:
    """(rank, exit code) as torchrun reports them: `rank : 1 (local_rank: 1)`, `exitcode : -9 (pid: …)`."""
    rank = None
    for line in lines:
        named, code = TORCHRUN_RANK.search(line), TORCHRUN_CODE.search(line)
        rank = rank if named is None else int(named.group(1))
        if code is not None:
            yield rank, int(code.group(1))


CALLED_PROCESS = re.compile(
    r"CalledProcessError: Command .* "
    r"(?:died with <Signals\.\w+: (?P<signal>\d+)>|returned non-zero exit status (?P<code>\d+))\.$"
)
ACCELERATES_LAUNCHER = "accelerate/commands/launch.py"


def code_of(death: RankDeath, launcher_tail: Sequence[str]) -> int | None:
    """The exit code of the rank that ended first: what the kernel showed, else what torchrun reports."""
    return death.code if death.code is not None else find_rank_code(launcher_tail, death.rank)


def find_rank_code(lines: Sequence[str], rank: int) -> int | None:
    """Return this rank's exit code from torchrun's report."""
    return next((code for one, code in _reported(lines) if one == rank), None)


def reported_failure(lines: Sequence[str]) -> tuple[int | None, int | None]:
    """(rank, exit code) of the first failure that the launcher reports, for a rank that nobody saw.

    torchrun's report, else the error with which `accelerate launch` of one process ends; it gives that process no rank.
    """
    for place, line in reversed(list(enumerate(lines))):
        own = CALLED_PROCESS.search(line.rstrip())
        if own is not None:
            opened = max((at for at in range(place) if lines[at].startswith("Traceback ")), default=0)
            if any(ACCELERATES_LAUNCHER in frame for frame in lines[opened:place]):
                return 0, -int(own["signal"]) if own["signal"] else int(own["code"])
            break
    begins = [place for place, line in enumerate(lines) if "Root Cause (first observed failure)" in line]
    found = _reported(lines[begins[-1] :] if begins else ())
    return next(((rank, code) for rank, code in found if rank is not None), (None, None))


def title_of_end(launch: int, data: Mapping[str, Any]) -> str:
    """Return one line for `chronicle log`; the cause stands in it where the words before it do not say it."""
    how = "failed"
    said: EndCause | None = EndCause.CRASH
    if data["stopped_by"] == "proposal":
        how, said = "stopped on a proposal", EndCause.PROPOSAL
    elif data["stopped_by"] == "stall":
        how, said = "stopped, because it stood still", None
    elif data["stopped_by"] == "signal" and data.get("launcher_code") == 0:
        how, said = f"saved and ended on {data['stop_signal']}", None
    elif data["signal"]:
        how, said = f"ended by {data['signal']}", None
    elif data["exit_code"] == 0:
        how, said = "ended with code 0", EndCause.ENDED
        if data.get("cause") == EndCause.FINISHED:
            how, said = "completed", EndCause.FINISHED
    at = "" if data["last_step"] is None else f" at step {data['last_step']}"
    cause = data.get("cause")
    return f"launch {launch} {how}{at}" + (f": {cause}" if cause and cause != said else "")


def format_end(launch: int, data: Mapping[str, Any]) -> list[str]:
    """Return the lines for the terminal; a successful launch gives one line."""
    ended = data["ended_processes"]
    counts = ", ".join(f"{ended[key]} {word}" for key, word in (("terminated", "TERM"), ("killed", "KILL")) if ended[key])
    lines = [f"{title_of_end(launch, data)}, after {data['duration_seconds']:.1f} s, exit code {data['exit_code']}"]
    if data.get("cause") == EndCause.ENDED:
        lines.append(data["because"])
    elif data.get("cause") not in (None, EndCause.FINISHED, EndCause.PROPOSAL):
        lines.append(f"cause: {data['cause']} ({data['because']})")
    first = data.get("first_to_end")
    if first is not None:
        before = first["seconds_before_launcher"]
        code = f", exit code {first['exit_code']}" if "exit_code" in first else ""
        who = f"rank {first['rank']} (pid {first['pid']}{code})"
        lines.append(f"first rank to end: {who}, {before:.1f} s before the launcher")
    if data.get("tail"):
        lines.append(f"last lines of {data['tail_of']}:")
        lines += [f"  {line}" for line in data["tail"]]
    if counts:
        lines.append(f"ended remaining processes: {counts}")
    if ended["left"]:
        lines.append(f"still alive, in an uninterruptible system call: {', '.join(map(str, ended['left']))}")
    if data.get("log_bytes_lost"):
        lines.append(f"{data['log_bytes_lost']} bytes of logs could not be written")
    return lines


# --- Seals: digests of logs and evidence files

SEALING: Mapping[str, type[LaunchEnd] | type[SealedParts]] = {LaunchEnd.KIND: LaunchEnd, SealedParts.KIND: SealedParts}
PART = "*.[0-9][0-9][0-9][0-9].log"
SEALED = ("*.log", "evidence/*.jsonl", "metrics.jsonl", "samples.jsonl")


class LaunchSeals:
    """Seals the files of one launch: parts of logs that are full soon, all others at its end."""

    def __init__(self, paths: RunPaths, number: int, record: LaunchRecord) -> None:
        self._paths, self._number, self._record = paths, number, record
        self._parts: set[Path] = set()

    def seal_parts(self) -> None:
        """Write the digests of the parts that are full to the journal now, not at the end of the launch."""
        for part in set(self._paths.launch_dir(self._number).glob(PART)) - self._parts:
            self._parts.add(part)
            seal = seal_file(self._paths, part)
            if seal is not None:
                self._record.write(SealedParts(sealed=(seal,)), title=f"log part {part.name} sealed")

    def seal_all(self, is_ours: Callable[[Path], bool]) -> list[Mapping[str, Any]]:
        """Return the seals of all files this launch wrote on this node, rotated parts included."""
        directory = self._paths.launch_dir(self._number)
        files = sorted(path for pattern in SEALED for path in directory.glob(pattern) if is_ours(path))
        told = events_of(read_journal(self._paths).entries, SealedParts)
        known = {seal["path"]: seal for entry, event in told if entry.launch == self._number for seal in event.sealed}
        seals = (known.get(_below_run(self._paths, path)) or seal_file(self._paths, path) for path in files)
        return [seal for seal in seals if seal is not None]


def seal_file(paths: RunPaths, path: Path) -> dict[str, Any] | None:
    """Return the seal of a file as it is now; None when it cannot be read."""
    try:
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            size = file.tell()
    except OSError:
        return None
    return {"path": _below_run(paths, path), "bytes": size, "sha256": digest}


def _below_run(paths: RunPaths, path: Path) -> str:
    return path.relative_to(paths.run_dir).as_posix()


def broken_seals(
    paths: RunPaths, entries: Iterable[Entry], wanted: Callable[[str], bool] = lambda path: True
) -> dict[str, str]:
    """The sealed files that are missing or have changed, each with a sentence; keys: paths below the run directory."""
    problems = {}
    for entry in entries:
        event = SEALING[entry.kind].of(entry) if entry.kind in SEALING else None
        for seal in event.sealed if event is not None else ():
            problem = _check(paths, seal) if wanted(str(seal["path"])) else None
            if problem:
                problems[str(seal["path"])] = f"{problem} (sealed by {entry.kind} {entry.id})"
    return problems


def _check(paths: RunPaths, seal: Mapping[str, Any]) -> str | None:
    now = seal_file(paths, paths.run_dir / str(seal["path"]))
    if now is None:
        return f"`{seal['path']}` cannot be read"
    if now["sha256"] != seal["sha256"]:
        return f"`{seal['path']}` has changed: {seal['bytes']:,} bytes when sealed, {now['bytes']:,} now"
    return None

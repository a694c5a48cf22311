"""One launch as the story tells it: where it began and ended, on which LR, what the guard said, what it saved. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from chronicle.journal import Entry, LaunchSpan, Lineage
from chronicle.journal.lr_ledger import LedgerLine, LrLedger
from chronicle.story.plain import plain

__all__ = ["LaunchStory", "SavedCheckpoint", "saved_checkpoint", "tell_launches"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """A checkpoint that a launch wrote, by its entry."""

    step: int
    launch: int | None
    path: str
    entry_id: str
    kept: bool = True  # its step belongs to the lineage
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchStory:
    """A launch; `verdict` is its newest guard verdict (`passed`, `warned`, `refused`) or None when no guard spoke."""

    number: int
    span: LaunchSpan
    started: str = ""
    ended: str = ""
    title: str = ""
    host: str = ""
    silent_hosts: tuple[str, ...] = ()  # nodes of it that started and have not said that they ended
    argv: tuple[str, ...] = ()
    git_commit: str = ""
    exit_code: int | None = None
    signal: str = ""
    verdict: str | None = None
    verdict_entry: Entry | None = None
    lr: LedgerLine | None = None
    checkpoints: tuple[SavedCheckpoint, ...] = ()
    alive: bool = False
    imported: bool = False

    @property
    def resumed(self) -> bool:
        """Whether it continued from a checkpoint."""
        return bool(self.span.start_step)

    @property
    def verified(self) -> bool:
        """Whether a guard compared its memory with what was saved, and let it pass."""
        entry = self.verdict_entry
        return self.verdict == "passed" and entry is not None and bool(entry.data.get("verified", True))

    @property
    def outcome(self) -> str:
        """How it stands, in a few words."""
        if self.alive:
            return "running"
        if not self.ended:
            return "no end recorded"
        how = "ended" if self.exit_code is None else f"ended with code {self.exit_code}"
        how = f"ended by {plain(self.signal)}" if self.signal else how
        return f"{how}, no end recorded on {plain(', '.join(self.silent_hosts))}" if self.silent_hosts else how


def tell_launches(
    entries: Iterable[Entry], lineage: Lineage, ledger: LrLedger, alive: Sequence[int] = ()
) -> tuple[LaunchStory, ...]:
    """Every launch in order of its number."""
    lines = {line.launch: line for line in ledger.lines}
    told = {
        span.number: LaunchStory(number=span.number, span=span, lr=lines.get(span.number), alive=span.number in alive)
        for span in lineage.launches
    }
    saved: dict[int, list[SavedCheckpoint]] = {}
    for entry in entries:
        if entry.launch not in told or entry.launch is None:
            continue
        if entry.kind == "checkpoint":
            saved.setdefault(entry.launch, []).extend(saved_checkpoint(entry, lineage))
        else:
            told[entry.launch] = _learn(told[entry.launch], entry)
    return tuple(replace(told[n], checkpoints=tuple(saved.get(n, ()))) for n in sorted(told))


def _learn(launch: LaunchStory, entry: Entry) -> LaunchStory:
    data = entry.data
    host = str(data.get("host") or "")
    if entry.kind == "launch.start" and launch.started:  # another node of it
        return replace(launch, silent_hosts=(*launch.silent_hosts, host))
    if entry.kind == "launch.start":
        return replace(
            launch,
            silent_hosts=(host,) if host else (),
            started=entry.ts,
            title=entry.title,
            host=host,
            argv=tuple(str(word) for word in data.get("argv") or ()),
            git_commit=str(data.get("git_commit") or ""),
            imported=bool(data.get("imported")),
        )
    if entry.kind == "launch.end":
        code, signal = data.get("exit_code"), data.get("signal")
        number = code if isinstance(code, int) else None
        signal = "" if signal is None else _signal(signal)
        silent = tuple(one for one in launch.silent_hosts if one != host) if host else ()
        launch = replace(launch, silent_hosts=silent, ended=entry.ts, alive=False)
        if launch.exit_code or launch.signal:
            return launch  # another node has failed: that is how the launch ended
        return replace(launch, exit_code=number, signal=signal)
    if entry.kind == "guard.verdict":
        return replace(launch, verdict=str(data.get("verdict") or "unknown"), verdict_entry=entry)
    return launch


def _signal(value: object) -> str:
    return f"signal {value}" if isinstance(value, int) else str(value)


def saved_checkpoint(entry: Entry, lineage: Lineage) -> Iterable[SavedCheckpoint]:
    """The checkpoint of an entry; none where it names no step."""
    if entry.step is not None:
        yield SavedCheckpoint(
            step=entry.step,
            launch=entry.launch,
            path=str(entry.data.get("path") or ""),
            entry_id=entry.id,
            kept=entry.launch is not None and lineage.contains(entry.launch, entry.step),
            data=entry.data,
        )

"""The record of the first pass: one digest for every batch that entered the model, in one file per launch and rank.

`<run>/batches/<record>.<rank>` begins with a line of JSON, then come 16 bytes a batch: digest, the optimizer step that used it,
its place in the pass of its loader (0: not known). A checkpoint carries the record's id and how many batches were seen when it
was saved, so the batch that followed it is one read away. A launch that resumes starts a record of its own that names the
position it went on from: together they are the first pass.

The file is written without fsync: it survives a killed process, not a power cut. It keeps the newest two to four million
batches.

No torch here.
"""

import json
import os
import struct
import weakref
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rollback.disk.durable import write_atomic

VERSION = 2
ENTRY = struct.Struct("<QII")
MAX_BATCHES = 4_000_000
MAX_UNBEGUN = 100_000
MAX_RECORDS = 64  # launches that a first pass may be put together from


@dataclass(frozen=True, slots=True)
class Position:
    """A place in the first pass: so many batches of this record had been seen."""

    record: str
    num_seen: int

    def __str__(self) -> str:
        return f"{self.record}:{self.num_seen}"

    @classmethod
    def parse(cls, text: str) -> "Position | None":
        """The position that a checkpoint carries; None when it carries none."""
        record, _, number = text.rpartition(":")
        return cls(record, int(number)) if record and number.isdigit() else None


class BatchRecord:
    """The record of this launch and rank. Nothing is written before the first optimizer step, and then each batch at once."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._path: Path | None = None
        self._fd = -1
        self.record = ""
        self.num_seen = 0
        self._early: list[tuple[int, int, int]] = []  # batches before the first step
        self._first = 0  # index of the first batch that is kept in the file

    def position_after(self, num_waiting: int) -> str:
        """What a checkpoint saved now carries, with batches that are still to be added; "" when nothing is recorded."""
        return "" if self._path is None else str(Position(self.record, self.num_seen + num_waiting))

    def add(self, digest: int, step: int, place: int) -> None:
        """One batch, which the optimizer step `step` will use; 0: the launch's first."""
        self.num_seen += 1
        if self._directory is None:
            return
        if self._path is not None:
            if self.num_seen - self._first > MAX_BATCHES:
                self._drop_old(self._path)
            os.write(self._fd, ENTRY.pack(digest, step, place))
        elif self.num_seen > MAX_UNBEGUN:
            self._directory, self._early = None, []  # no optimizer step was ever seen
        else:
            self._early.append((digest, step, place))

    def begin(self, record: str, rank: int, *, start_step: int, parent: Position | None, launch: int | None) -> None:
        """The first step is about to be taken from `start_step`; the launch went on from `parent`. `record`: the new id."""
        if self._directory is None or self._path is not None:
            return
        self.record, path = record, self._directory / f"{record}.{rank}"
        header = {"v": VERSION, "first": 0, "start_step": start_step, "parent": str(parent or ""), "launch": launch}
        early = [ENTRY.pack(digest, step or start_step + 1, place) for digest, step, place in self._early]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_header(header) + b"".join(early))
        self._early = []
        self._open(path)

    def _open(self, path: Path) -> None:
        self._path, self._fd = path, os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._close = weakref.finalize(self, os.close, self._fd)

    @property
    def is_removed(self) -> bool:
        """Whether somebody removed the directory that it is written to."""
        return self._path is not None and not self._path.parent.exists()

    def _drop_old(self, path: Path) -> None:
        """Keep the newer half."""
        header, entries = _read(path)
        half = len(entries) // 2
        self._first = header["first"] + half
        write_atomic(path, _header({**header, "first": self._first}) + entries[half:].tobytes(), durable=False)
        self._close()
        self._open(path)


def _header(values: dict[str, Any]) -> bytes:
    return json.dumps(values, separators=(",", ":")).encode() + b"\n"


# ---- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstPass:
    """The first pass as it was recorded. `entries[position]` followed the checkpoint; columns: `digest`, `step`, `place`.

    `resumed`: indices where a launch went on from a checkpoint, so that `place` counts from there.
    """

    entries: Any
    position: int
    resumed: frozenset[int] = frozenset()

    @property
    def followed(self) -> int | None:
        """The digest of the batch that followed; None when the run stopped there."""
        return int(self.entries["digest"][self.position]) if self.position < len(self.entries) else None

    def find(self, digest: int) -> tuple[int, ...]:
        """All indices of this batch."""
        return tuple(int(index) for index in (self.entries["digest"] == digest).nonzero()[0])

    def step(self, index: int) -> int:
        """The optimizer step that used the batch."""
        return int(self.entries["step"][index])

    def place(self, index: int) -> int:
        """Its place in the pass of its loader, from 1; 0 when not known."""
        return int(self.entries["place"][index])

    def begins_pass(self, index: int) -> bool:
        """Whether the loader began a pass with this batch."""
        return index < len(self.entries) and self.place(index) == 1 and index not in self.resumed

    def begins_data(self, index: int) -> bool:
        """Whether data begin here: the first batch of all, of a pass, or of a resume that began with one of those again.

        A script that seeds itself and starts its data in every launch does so: its second resume repeats what its first did.
        """
        if index == 0 or self.begins_pass(index):
            return True
        again = self.find(int(self.entries["digest"][index])) if index in self.resumed else ()
        return any(other == 0 or self.begins_pass(other) for other in again)

    def pass_lengths(self) -> tuple[int, ...]:
        """Batches of every pass that began and ended inside one launch."""
        starts = [int(i) for i in (self.entries["place"] == 1).nonzero()[0]]
        return tuple(b - a for a, b in pairwise(starts) if a not in self.resumed and b not in self.resumed)


def read_first_pass(directory: Path, position: Position, rank: int) -> FirstPass | None:
    """The whole first pass around a checkpoint, from the records of all launches that led to it; None without a record."""
    import numpy

    parts: list[Any] = []
    num_before, at = 0, position  # batches that are on record before the checkpoint
    for number in range(MAX_RECORDS):
        try:
            header, entries = _read(directory / f"{at.record}.{rank}")
        except (OSError, ValueError, KeyError):
            break
        kept = at.num_seen - int(header["first"])
        if kept < 0:
            break  # what followed was dropped
        parts.insert(0, entries[:kept] if number else entries)
        num_before += len(parts[0]) if number else kept
        parent = Position.parse(str(header.get("parent") or ""))
        if parent is None or header["first"]:
            break
        at = parent
    if not parts:
        return None
    begins = numpy.cumsum([0, *(len(part) for part in parts)])[:-1]
    resumed = frozenset(int(index) for index in begins[1:])
    return FirstPass(entries=numpy.concatenate(parts), position=num_before, resumed=resumed)


def _read(path: Path) -> tuple[dict[str, Any], Any]:
    import numpy

    with path.open("rb") as file:
        header = json.loads(file.readline())
        if not isinstance(header, dict) or header.get("v") != VERSION:
            raise ValueError(f"`{path}` is a record of version {header!r:.40}: expected {VERSION}")
        rest = file.read()
    whole = len(rest) - len(rest) % ENTRY.size
    return header, numpy.frombuffer(rest[:whole], dtype=[("digest", "<u8"), ("step", "<u4"), ("place", "<u4")])

"""The first pass as it was recorded: one digest for every batch that entered the model. What the first batch of a resume is.

`<run>/batches/<record>.<rank>` begins with a line of JSON, then come 16 bytes a batch: digest, the optimizer step that used it,
its place in the pass of its loader (0: not known). A checkpoint carries the record's id and how many batches were seen when it
was saved, so the batch that followed it is one read away. A launch that resumes starts a record of its own that names the
position it went on from: together they are the first pass.

The file is written without fsync: it survives a killed process, not a power cut. It keeps the newest two to four million
batches.

No torch here.
"""

import json
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from chronicle.resume.checks.check import Check, failed, not_compared, noted

NAME = "next batch"
VERSION = 2
ENTRY = struct.Struct("<QII")
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
            header, entries = read_record(directory / f"{at.record}.{rank}")
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


def read_record(path: Path) -> tuple[dict[str, Any], Any]:
    """The head of one record, and its entries. Raises OSError, and ValueError for another form."""
    import numpy

    with path.open("rb") as file:
        header = json.loads(file.readline())
        if not isinstance(header, dict) or header.get("v") != VERSION:
            raise ValueError(f"`{path}` is a record of version {header!r:.40}: expected {VERSION}")
        rest = file.read()
    whole = len(rest) - len(rest) % ENTRY.size
    return header, numpy.frombuffer(rest[:whole], dtype=[("digest", "<u8"), ("step", "<u4"), ("place", "<u4")])


class OtherBatch:
    """What the first batch of a resume is, when it is not known to be the one that followed the save."""

    def __init__(self, before: FirstPass, first: int) -> None:
        self._before, self._same = before, before.find(first)
        at = before.position
        self._nearest = min(self._same, key=lambda index: (abs(index - at), index), default=None)

    @property
    def _nothing_followed(self) -> bool:
        return self._before.position >= len(self._before.entries)

    @property
    def _begins_pass(self) -> bool:
        return self._before.begins_pass(self._before.position)

    @property
    def is_astray(self) -> bool:
        """Whether nobody can have meant it: scripts begin a pass again on purpose, and a new pass may come in a new order."""
        before, nearest = self._before, self._nearest
        if self._nothing_followed:
            return False
        if nearest is None:
            return not self._begins_pass
        return nearest > before.position or not before.begins_data(nearest)

    def check(self, *, exactly: bool, continues: bool, beside: int | None = None) -> Check:
        """`exactly`: the trainer promised the next batch. `continues`: it claims to skip what was seen.

        `beside`: this rank, where another one saved alone, so that what followed here may never have been written.
        """
        before, nearest, num = self._before, self._nearest, len(self._before.entries)
        if self._nothing_followed:
            return self._after_the_end(beside)
        expected = f"the batch of step {before.step(before.position)}"
        if nearest is None:
            cause = f"the batch is none of the {num} of the first pass: another order, other samples, or another augmentation"
            also = "; the first pass began a new epoch here too" if self._begins_pass else ""
            return _differs(exactly, expected, "an unknown batch", cause + also)
        found = f"the batch of step {before.step(nearest)}"
        if nearest < before.position:
            refused = exactly or (continues and before.begins_data(nearest))
            return _differs(refused, expected, found, self._repeats(nearest))
        num_left = nearest - before.position
        left_out = "1 batch of the first pass is" if num_left == 1 else f"{num_left} batches of the first pass are"
        return _differs(exactly, expected, found, f"{left_out} left out; {found} comes first")

    def _after_the_end(self, beside: int | None) -> Check:
        """Nothing is on record after the save."""
        before, position = self._before, self._before.position
        if position > len(before.entries):
            why = "the record of batches ends before this save"
        elif beside is None:
            why = "the run stopped right at this save, or before the batch that followed was on record"
        else:
            why = f"rank {beside} took no part in this save, and the batch that followed there is not on record"
        if self._same and position:
            why += f"; this launch begins with the batch of step {before.step(self._same[0])}"
        return not_compared(NAME, "M4", why)

    def _repeats(self, index: int) -> str:
        before, again = self._before, self._before.position - index
        if self._begins_pass and before.begins_data(index):
            return f"this pass of the loader comes in the order of the pass that began at step {before.step(index)}"
        number = "1 batch repeats" if again == 1 else f"{again} batches repeat"
        what = f"the batch of step {before.step(index)} of the first pass comes again: {number}"
        if index == 0:
            return what + "; the data start again from their beginning"
        return what + ("; the pass of the loader starts again" if before.begins_data(index) else "")


def _differs(refused: bool, expected: str, found: str, cause: str) -> Check:
    return (failed if refused else noted)(NAME, "M4", expected=expected, found=found, cause=cause)

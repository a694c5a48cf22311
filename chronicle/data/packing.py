"""Documents of a plan, packed to rows of a fixed length: which pieces a row holds is planned, and the same on any ranks.

    count_tokens(PlanDataset(["data/web.index"], decode=tokenize), "data/tokens.npz", processes=16)        # once
    data = PackedDataset(["data/web.index"], decode=tokenize, length=2048, tokens="data/tokens.npz")
    loader = data.loader(batch_size=8)          # batches of {"tokens": (8, 2048), "document": (8, 2048)}
    data.records(row)                           # the documents in a row, and which of their tokens

The documents follow one another in the plan's order, and row n holds tokens n × length to (n + 1) × length of that sequence:
nothing is padded or dropped, a document goes on in the next row, also across epochs. To know where a row begins, without
reading the documents before it, each document's number of tokens is counted once; the counts belong to the plan, so another
tokenizer is another plan. What separates documents (an end-of-text token) is of `decode`, which returns one document's tokens.

A seek adds up the counts of the documents before it, by blocks of 1,024 (5 ms of CPU for a block that spans 13 epochs of a
small source, measured). A state holds the sum where it was taken, so a resume adds up a block or two.
"""

from __future__ import annotations

import hashlib
import io
import sys
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from chronicle.data.plan import DataPlan
from chronicle.data.plan_dataset import BLOCK_SAMPLES, PlanDataset
from chronicle.errors import DataError
from rollback.disk.durable import write_atomic

CHUNK = 512  # documents that a process counts at a time
Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedPlan(DataPlan):
    """The plan of the documents, the length of a row, and the sha256 of the documents' numbers of tokens."""

    length: int
    tokens: str

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain values."""
        return {**DataPlan.to_json(self), "packed": {"length": self.length, "tokens": self.tokens}}


@dataclass(frozen=True, slots=True, kw_only=True)
class DocPiece:
    """Tokens `first` to `end` of sample `index` of a source, which is sample `number` of the plan's sequence."""

    source: str
    index: int
    number: int
    first: int
    end: int


class PackedDataset(PlanDataset):
    """Row n of the plan's documents: `tokens` and `document`, each of shape (length,) and int64.

    `document` numbers the documents of a row from 0: where it changes, attention may be cut. `tokens` names the file that
    `count_tokens` wrote. Positions, skips and states count rows. Other arguments are PlanDataset's, and its states, changes
    of ranks and rollbacks hold. Raises DataError where the counts are of other data, and at a row whose document has another
    number of tokens than was counted.
    """

    def __init__(self, sources: Mapping[Any, int] | Sequence[Any], *, length: int, tokens: str | Path, **options: Any) -> None:
        super().__init__(sources, **options)
        if length < 1:
            raise DataError(f"rows of {length} tokens, expected 1 or more")
        held = read_counts(tokens)
        self._counts: list[Counts] = []
        for source in self.plan.sources:
            if source.digest not in held:
                raise DataError(f"`{tokens}` has no counts of source `{source.name}` as it is now",
                                "count_tokens(data, path) counts it")
            self._counts.append(held[source.digest])
        if not any(int(counts.sum()) for counts in self._counts):
            raise DataError(f"`{tokens}`: no document has a token", "`decode` returns the tokens of a document")
        digest = hashlib.sha256(b"".join(counts.astype("<i8").tobytes() for counts in self._counts)).hexdigest()
        self.length = length
        self.plan: PackedPlan = PackedPlan(seed=self.plan.seed, batch_size=self.plan.batch_size, sources=self.plan.sources,
                                           length=length, tokens=digest)
        self._marks = [(0, 0)]  # (tokens, blocks) before the blocks whose documents were added up so far
        self._ends: tuple[int, Any, Counts] | None = None

    def __len__(self) -> int:
        """Rows of as many tokens as one reading of each source has, by the mixture's shares."""
        total = sum(source.weight for source in self.plan.sources)
        samples = super().__len__()
        expected = sum(samples * source.weight * int(counts.sum()) / (total * len(counts))
                       for source, counts in zip(self.plan.sources, self._counts, strict=True))
        return max(1, int(expected // self.length))

    def __getitem__(self, number: int) -> dict[str, Counts]:
        """Return row `number`."""
        tokens, document = np.empty(self.length, np.int64), np.empty(self.length, np.int64)
        at = 0
        for order, (source, piece) in enumerate(self._pieces(number)):
            content = self._read(source, piece.index)
            counted = int(self._counts[source][piece.index])
            if len(content) != counted:
                reason = f"sample {piece.index} of `{piece.source}` has {len(content):,} tokens, {counted:,} were counted"
                raise DataError(reason, "count again with this `decode`: the plan is then another one")
            end = at + piece.end - piece.first
            tokens[at:end], document[at:end] = content[piece.first:piece.end], order
            at = end
        return {"tokens": tokens, "document": document}

    def __getitems__(self, numbers: Sequence[int]) -> list[dict[str, Counts]]:
        """Return the rows of a batch. Raises DataError where a loader shuffles."""
        if not isinstance(numbers, range):
            self._watch(numbers)
        return [self[number] for number in numbers]

    def records(self, number: int) -> list[DocPiece]:
        """Return the documents in a row, in order: what to look at when a row is suspected. No document is read."""
        return [piece for _, piece in self._pieces(number)]

    def reshuffled(self, position: int) -> int:
        """Read the rest in a new order from the block after row `position` on; return the first row that it changes."""
        block = self._block_of(position * self.length)
        if self._before(block) < position * self.length:
            block += 1
        super().reshuffled(block * BLOCK_SAMPLES)
        before = self._before(block)
        self._marks = [mark for mark in self._marks if mark[1] <= block]
        return before // self.length

    def place(self, position: int) -> dict[str, Any]:
        """Return what a state adds, so that a resume need not add up from the beginning: tokens and blocks before the row."""
        block = self._block_of(position * self.length)
        return {"mark": [self._before(block), block]}

    def found(self, state: Mapping[str, Any]) -> None:
        """Take up a state: its order, and where it was."""
        super().found(state)
        tokens, block = state.get("mark", (0, 0))
        self._marks = sorted({(0, 0), (int(tokens), int(block))})

    def _pieces(self, number: int) -> Iterator[tuple[int, DocPiece]]:
        """Yield (source number, piece) of a row."""
        token, end = number * self.length, (number + 1) * self.length
        block = self._block_of(token)
        while token < end:
            ends, before, rows = self._ends_of(block), self._before(block), self._rows(block)
            at = int(np.searchsorted(ends, token - before, "right"))
            while at < len(ends) and token < end:
                source, index = (int(value) for value in rows[at])
                start = before + (int(ends[at - 1]) if at else 0)
                stop = min(end, before + int(ends[at]))
                if stop > token:  # a document may be empty
                    yield source, DocPiece(source=self.plan.sources[source].name, index=index,
                                           number=block * BLOCK_SAMPLES + at, first=token - start, end=stop - start)
                token, at = stop, at + 1
            block += 1

    def _block_of(self, token: int) -> int:
        """Return the block of samples that holds a token of the sequence."""
        before, block = self._marks[bisect_right(self._marks, (token, sys.maxsize)) - 1]
        while True:
            total = int(self._ends_of(block)[-1])
            if token < before + total:
                return block
            before, block = before + total, block + 1
            self._mark(before, block)

    def _before(self, block: int) -> int:
        """Return the tokens before a block: known for all up to the last one that was asked for."""
        at = next(number for number in range(len(self._marks) - 1, -1, -1) if self._marks[number][1] <= block)
        before, known = self._marks[at]
        while known < block:
            before, known = before + int(self._ends_of(known)[-1]), known + 1
            self._mark(before, known)
        return before

    def _mark(self, before: int, block: int) -> None:
        if block > self._marks[-1][1]:
            self._marks.append((before, block))

    def _ends_of(self, block: int) -> Counts:
        """Return the running sum of the tokens of a block's documents."""
        if self._ends is None or self._ends[0] != block or self._ends[1] is not self.segments:
            rows = self._rows(block)
            counts = np.empty(len(rows), np.int64)
            for source, known in enumerate(self._counts):
                mine = rows[:, 0] == source
                counts[mine] = known[rows[mine, 1]]
            self._ends = block, self.segments, np.cumsum(counts)
        return self._ends[2]


# --- Counting


def count_tokens(data: PlanDataset, path: str | Path, *, processes: int = 1) -> None:
    """Count the tokens that `decode` gives for every document of the sources, each once, and write them to a file.

    Sources that the file has already are left. With on_error="skip" a document that cannot be decoded has none, so it is in no
    row, and it is told on stderr; else its error ends the count.
    """
    held = read_counts(path) if Path(path).exists() else {}
    for source, spec in enumerate(data.plan.sources):
        if spec.digest in held:
            continue
        parts = [(source, start, min(start + CHUNK, spec.num_samples)) for start in range(0, spec.num_samples, CHUNK)]
        if processes > 1:
            _counted.append(data)  # forked processes have it, with whatever `decode` is
            with get_context("fork").Pool(processes) as pool:
                found = pool.map(_count_in_fork, parts)
            _counted.pop()
        else:
            found = [_count(data, *part) for part in parts]
        held[spec.digest] = np.concatenate(found)
        content = io.BytesIO()
        np.savez_compressed(content, **held)  # type: ignore[arg-type]
        write_atomic(Path(path), content.getvalue(), durable=False)


_counted: list[PlanDataset] = []


def _count_in_fork(part: tuple[int, int, int]) -> Counts:
    return _count(_counted[-1], *part)


def _count(data: PlanDataset, source: int, first: int, end: int) -> Counts:
    return np.array([data.measured(source, number, len) for number in range(first, end)], np.int64)


def read_counts(path: str | Path) -> dict[str, Counts]:
    """Return digest of a source → tokens of each of its documents. Raises DataError for a missing or damaged file."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name].astype(np.int64) for name in file.files}
    except FileNotFoundError as problem:
        raise DataError(f"`{path}` does not exist", "count_tokens(data, path) counts each document once") from problem
    except (OSError, ValueError, EOFError, KeyError, BadZipFile) as problem:
        raise DataError(f"`{path}` cannot be read: {problem}", "remove it, and count again") from problem

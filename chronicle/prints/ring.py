"""Step prints on disk: 64 bytes that identify what happened in one optimizer step, in one ring file a launch and rank.

`<launch>/prints-<rank>.ring` begins with one line of JSON padded to 1024 bytes, then come `capacity` places of 64 bytes. The
newest print takes the place of the oldest. A print holds:

    step       optimizer steps completed when it was over
    seq        count of prints of this file, which gives their order and where the ring begins
    flags      whether this print begins a launch or follows a load, whether the loss was seen, and labels by their name
               (`SeenParts`); any other field that is not 0 was seen
    batches    micro-batches of the step, at most 255
    batch      digest of all bits of the micro-batches that were handed to the model, in their order
    labels     digest of what their loss is computed from, where that is known
    gradient   digest of sums of all gradients, before the optimizer steps
    weights    digest of sums of all weights, after it
    size       the norm of the gradient, as it was logged for this step (torch's has 32 bits, too)
    torch      torch's generators (those of devices too) when the first micro-batch entered
    python     Python's generator then, numpy: NumPy's global one
    options    LR, weight decay, betas, eps and momentum of the parameter groups, as they were used
    lr         LR of the first group
    loss       as it was logged for this step, in full precision
    check      checksum of the print: a place that was cut by a crash is no print

Equal prints of one step mean: equal input, equal arithmetic, equal result, as far as a sum of bits tells. The file is
written without fsync: it survives a killed process, not a power cut. No torch here.
"""

import json
import math
import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntFlag
from pathlib import Path
from typing import Any

from chronicle.errors import ChronicleError

VERSION = 8
HEADER_BYTES = 1024
BODY = struct.Struct("<IIHBxIIQIfIHHHxxfd")  # a checksum of 4 bytes follows
HEAD = struct.Struct("<IIH")  # step, seq, flags
PRINT_BYTES = BODY.size + 4
MANY = 0xFFFFFFFF
LARGEST_NORM = 3.4e38  # of 32 bits
CAPACITY = 65_536  # prints: 4 MiB a rank


class SeenParts(IntFlag):
    """What a print holds; what was not seen is 0 and is not compared."""

    BEGINS = 1  # no step: the weights as they were before the first step of a launch, or after a load
    BATCH = 2
    GRADIENT = 4
    WEIGHTS = 8
    GENERATORS = 16
    OPTIONS = 32
    LOSS = 64
    TARGETS = 128  # what the loss is computed from: labels
    LABELS = 256  # they have their name: what has none may be numbers of rows, by which labels are looked up in a table
    NORM = 1024


NOTHING = SeenParts(0)
STORED = SeenParts.BEGINS | SeenParts.LOSS | SeenParts.LABELS
# Of these a field that is not 0 was seen
BY_FIELD = {
    "batch": SeenParts.BATCH,
    "labels": SeenParts.TARGETS,
    "gradient": SeenParts.GRADIENT,
    "weights": SeenParts.WEIGHTS,
    "torch": SeenParts.GENERATORS,
    "options": SeenParts.OPTIONS,
    "size": SeenParts.NORM,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Print:
    """One step of one rank, as the module says; the fields stand in the order of the file."""

    step: int
    seq: int = 0
    seen: SeenParts = NOTHING
    batches: int = 0
    batch: int = 0
    labels: int = 0
    gradient: int = 0
    weights: int = 0
    size: float = 0.0
    torch: int = 0
    python: int = 0
    numpy: int = 0
    options: int = 0
    lr: float = 0.0
    loss: float = math.nan

    def pack(self, seq: int = 0) -> bytes:
        """The 64 bytes, as print number `seq` of its file."""
        kept = {
            "seq": seq & MANY,
            "seen": self.seen & STORED,
            "batches": min(255, self.batches),
            "batch": self.batch & MANY,
            "labels": self.labels & MANY,
            "weights": self.weights & MANY,
            "size": max(min(self.size, LARGEST_NORM), -LARGEST_NORM),  # NaN stays what it is
        }
        body = BODY.pack(*(kept.get(name, getattr(self, name)) for name in self.__slots__))
        return body + zlib.crc32(body).to_bytes(4, "little")

    @classmethod
    def unpack(cls, blob: bytes) -> "Print | None":
        """The print in these 64 bytes; None for an empty place and for one that was cut."""
        body, check = blob[: BODY.size], blob[BODY.size : PRINT_BYTES]
        if len(blob) < PRINT_BYTES or zlib.crc32(body).to_bytes(4, "little") != check:
            return None
        found = dict(zip(cls.__slots__, BODY.unpack(body), strict=True))
        seen = SeenParts(found["seen"])
        for name, part in BY_FIELD.items():
            if found[name] != 0:
                seen |= part
        return cls(**{**found, "seen": seen})


def ring_path(launch_dir: Path, rank: int) -> Path:
    """Where the prints of a rank are."""
    return launch_dir / f"prints-{rank}.ring"


def facts_path(launch_dir: Path) -> Path:
    """Where it stands what the prints of a launch were made by: code, packages, environment, arithmetic."""
    return launch_dir / "prints.json"


class _File:
    """A file that stays open."""

    _fd: int

    def close(self) -> None:
        """Close; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class RingWriter(_File):
    """Writes prints to the ring of a rank. A file of an earlier attempt of the same launch goes on. Raises OSError."""

    def __init__(self, path: Path, header: Mapping[str, Any], *, capacity: int = CAPACITY) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            known = read_ring(path)
            self._capacity, self._seq = known.capacity, max((one.seq + 1 for one in known.prints), default=0)
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            return
        line = json.dumps({"v": VERSION, "capacity": capacity, **header}, separators=(",", ":")).encode()
        if len(line) >= HEADER_BYTES:
            raise ValueError(f"the header of `{path}` has {len(line)} bytes: expected fewer than {HEADER_BYTES}")
        self._capacity, self._seq = capacity, 0
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        os.pwrite(self._fd, line.ljust(HEADER_BYTES - 1) + b"\n", 0)

    def add(self, one: Print) -> None:
        """Write one print."""
        os.pwrite(self._fd, one.pack(self._seq), HEADER_BYTES + self._seq % self._capacity * PRINT_BYTES)
        self._seq += 1


class SaveMark(_File):
    """The step that was saved last on any rank: eight bytes in a file of the launch, at which all ranks look in every step."""

    def __init__(self, launch_dir: Path) -> None:
        self._fd = os.open(launch_dir / "saved", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._seen = self._read()

    def set(self, step: int) -> None:
        """This rank has saved."""
        self._seen = step.to_bytes(8, "little")
        os.pwrite(self._fd, self._seen, 0)

    def has_changed(self) -> bool:
        """Whether another rank has saved since this was asked last."""
        known, self._seen = self._seen, self._read()
        return known != self._seen

    def _read(self) -> bytes:
        return os.pread(self._fd, 8, 0)


# ---- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The prints of one beginning: a launch, another attempt of its ranks, or a load. None: older than the ring."""

    begins: Print | None
    steps: Mapping[int, Print]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """The prints of one rank, oldest first, and what the file says of itself."""

    rank: int
    capacity: int
    header: Mapping[str, Any]
    prints: tuple[Print, ...]

    def steps(self) -> dict[int, Print]:
        """By step: its print. Where a step was taken twice (a load in between), the one taken last counts."""
        return {one.step: one for one in self.prints if SeenParts.BEGINS not in one.seen}

    def begins(self) -> tuple[Print, ...]:
        """Where launches or loads of this file began: `step` completed, and the weights then."""
        return tuple(one for one in self.prints if SeenParts.BEGINS in one.seen)

    def segments(self) -> list[Segment]:
        """The prints by their beginnings, oldest first."""
        found: list[Segment] = []
        steps: dict[int, Print] = {}
        for one in self.prints:
            if SeenParts.BEGINS in one.seen:
                steps = {}
                found.append(Segment(begins=one, steps=steps))
                continue
            if not found:
                found.append(Segment(begins=None, steps=steps))
            steps[one.step] = one
        return found


def read_ring(path: Path, *, since: int = 0) -> Ring:
    """The ring at `path`, with the prints of steps from `since` on, and all beginnings.

    Raises `ChronicleError` when it is none, or of another version; a cut print is left out.
    """
    try:
        blob = path.read_bytes()
        header = json.loads(blob[:HEADER_BYTES])
        if header["v"] != VERSION:
            raise ChronicleError(f"`{path}` has version {header['v']!r}: this program reads {VERSION}")
        capacity, rank = int(header["capacity"]), int(header["rank"])
    except OSError as problem:
        raise ChronicleError(f"cannot read `{path}`: {problem.strerror}") from problem
    except (ValueError, KeyError, TypeError) as problem:
        raise ChronicleError(f"`{path}` holds no step prints: {problem}") from problem
    places = range(HEADER_BYTES, len(blob) - PRINT_BYTES + 1, PRINT_BYTES)
    wanted = [begin for begin in places if _is_wanted(blob, begin, since)]
    found = [Print.unpack(blob[begin : begin + PRINT_BYTES]) for begin in wanted]
    prints = sorted((one for one in found if one is not None), key=lambda one: one.seq)
    return Ring(rank=rank, capacity=capacity, header=header, prints=tuple(prints))


def _is_wanted(blob: bytes, begin: int, since: int) -> bool:
    step, _, seen = HEAD.unpack_from(blob, begin)
    return step >= since or bool(seen & SeenParts.BEGINS)


def rings_of(launch_dir: Path) -> dict[int, Ring]:
    """The rings of a launch by rank; empty where its prints were off, or its guard never saw a step."""
    rings = (read_ring(path) for path in sorted(launch_dir.glob("prints-*.ring")))
    return {ring.rank: ring for ring in rings}

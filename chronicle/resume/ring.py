"""Step prints on disk: 64 bytes that identify what happened in one optimizer step, in one ring file a launch and rank.

`<launch>/prints-<rank>.ring` begins with one line of JSON padded to 1024 bytes, then come `capacity` places of 64 bytes. The
newest print takes the place of the oldest. A print holds:

    step       optimizer steps completed when it was over
    seq        count of prints of this file, which gives their order and where the ring begins
    flags      which of the fields below were seen (`SeenParts`), and whether this print begins a launch or follows a load
    batches    micro-batches of the step, at most 255
    check      checksum of the print: a place that was cut by a crash is no print
    batch      digest of all bits of the micro-batches that were handed to the model, in their order
    gradient   digest of a sample of the gradients, before the optimizer steps
    weights    digest of a sample of the weights, after it
    size       the norm of the gradient, as it was logged for this step (torch's has 32 bits, too); 0: it was not
    torch      torch's generators (those of devices too) when the first micro-batch entered
    python     Python's generator then, numpy: NumPy's global one
    options    learning rates and other numbers of all parameter groups
    modes      how the models are set when the first micro-batch enters (training or evaluation, dropout, frozen weights,
               autocast); 0: not seen
    output     checksum of what the model gave for the micro-batches; 0: not seen
    lr         LR of the first group
    loss       as it was logged for this step, in full precision

Equal prints of one step mean: equal input, equal arithmetic, equal result, as far as samples tell. The file is written without
fsync: it survives a killed process, not a power cut. No torch here.
"""

import json
import math
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntFlag
from pathlib import Path
from typing import Any

from chronicle.errors import ChronicleError

VERSION = 5
HEADER_BYTES = 1024
LAYOUT = struct.Struct("<IIBBHQQIfIHHHHIfd")
CHECK_AT, CHECK_END = 10, 12
PRINT_BYTES = LAYOUT.size
MANY, HALF = 0xFFFFFFFF, 0xFFFF
CAPACITY = 65_536  # prints: 4 MiB a rank
NUM_AT_ONCE = 64  # prints in memory before they are written
MAX_SECONDS = 0.5


class SeenParts(IntFlag):
    """What a print holds; what was not seen is 0 and is not compared."""

    BEGINS = 1  # no step: the weights as they were before the first step of a launch, or after a load
    BATCH = 2
    GRADIENT = 4
    WEIGHTS = 8
    GENERATORS = 16
    OPTIONS = 32
    LOSS = 64
    TARGETS = 128  # the batch is known with what the loss is computed from: labels too
    OUTPUT = 256  # from here on not in the file: a field that is not 0 was seen
    MODES = 512
    NORM = 1024


STORED = 255


NOTHING = SeenParts(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Print:
    """One step of one rank, as the module says."""

    step: int
    seq: int = 0
    seen: SeenParts = NOTHING
    batches: int = 0
    batch: int = 0
    gradient: int = 0
    weights: int = 0
    size: float = 0.0
    torch: int = 0
    python: int = 0
    numpy: int = 0
    options: int = 0
    modes: int = 0
    output: int = 0
    lr: float = 0.0
    loss: float = math.nan

    def pack(self) -> bytes:
        """The 64 bytes."""
        one = self
        first = (one.step, one.seq, int(one.seen), one.batches, one.batch, one.gradient, one.weights, one.size)
        more = (one.torch, one.python, one.numpy, one.options, one.modes, one.output)
        return pack_print(*first, *more, lr=one.lr, loss=one.loss)

    @classmethod
    def unpack(cls, blob: bytes) -> "Print | None":
        """The print in these 64 bytes; None for an empty place and for one that was cut."""
        if len(blob) < PRINT_BYTES or not any(blob):
            return None
        if blob[CHECK_AT:CHECK_END] != _check(blob[:CHECK_AT] + b"\0\0" + blob[CHECK_END:]):
            return None
        step, seq, seen, batches, _, batch, gradient, weights, norm, *rest = LAYOUT.unpack(blob)
        torch, python, numpy, options, modes, output, lr, loss = rest
        return cls(
            step=step,
            seq=seq,
            seen=_all_seen(seen, modes, output, norm),
            batches=batches,
            batch=batch,
            gradient=gradient,
            weights=weights,
            size=norm,
            torch=torch,
            python=python,
            numpy=numpy,
            options=options,
            modes=modes,
            output=output,
            lr=lr,
            loss=loss,
        )


def pack_print(
    step: int,
    seq: int,
    seen: int,
    batches: int,
    batch: int,
    gradient: int,
    weights: int,
    norm: float,
    torch: int,
    python: int,
    numpy: int,
    options: int,
    modes: int,
    output: int,
    lr: float,
    loss: float,
) -> bytes:
    """The 64 bytes of a print; the trainer makes them without a `Print`."""
    first = (step, seq & MANY, seen & STORED, min(255, batches), 0, batch, gradient, weights & MANY, norm)
    blob = LAYOUT.pack(*first, torch, python, numpy, options & HALF, modes, output & MANY, lr, loss)
    return blob[:CHECK_AT] + _check(blob) + blob[CHECK_END:]


def _all_seen(seen: int, modes: int, output: int, norm: float) -> SeenParts:
    found = SeenParts(seen)
    if modes:
        found |= SeenParts.MODES
    if output:
        found |= SeenParts.OUTPUT
    if norm != 0:
        found |= SeenParts.NORM
    return found


def _check(blob: bytes) -> bytes:
    return ((zlib.crc32(blob) & 0xFFFF) or 1).to_bytes(2, "little")


def ring_path(launch_dir: Path, rank: int) -> Path:
    """Where the prints of a rank are."""
    return launch_dir / f"prints-{rank}.ring"


def facts_path(launch_dir: Path) -> Path:
    """Where it stands what the prints of a launch were made by: code, packages, environment, arithmetic."""
    return launch_dir / "prints.json"


class RingWriter:
    """Appends prints to the ring of a rank. A file of an earlier attempt of the same launch goes on. Raises OSError."""

    def __init__(
        self,
        path: Path,
        header: Mapping[str, Any],
        *,
        capacity: int = CAPACITY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path, self._capacity, self._clock = path, capacity, clock
        self._pending: list[bytes] = []
        self._seq = 0
        self._written_at = 0.0
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            known = read_ring(path)
            self._capacity, self._seq = known.capacity, max((one.seq + 1 for one in known.prints), default=0)
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            return
        line = json.dumps({"v": VERSION, "capacity": capacity, **header}, separators=(",", ":")).encode()
        if len(line) >= HEADER_BYTES:
            raise ValueError(f"the header of `{path}` has {len(line)} bytes: expected fewer than {HEADER_BYTES}")
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        os.pwrite(self._fd, line.ljust(HEADER_BYTES - 1) + b"\n", 0)

    def add(self, step: int, *fields: Any) -> None:
        """Append one print, its fields in the order of `pack_print`; it is written after half a second or 64 prints."""
        self._pending.append(pack_print(step, self._seq + len(self._pending), *fields))
        if len(self._pending) >= NUM_AT_ONCE or self._clock() - self._written_at > MAX_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Hand what is pending to the operating system."""
        pending, self._pending = self._pending, []
        self._written_at = self._clock()
        while pending:
            place = self._seq % self._capacity
            some = pending[: self._capacity - place]
            os.pwrite(self._fd, b"".join(some), HEADER_BYTES + place * PRINT_BYTES)
            self._seq += len(some)
            pending = pending[len(some) :]

    def close(self) -> None:
        """Flush and close; a second call does nothing."""
        if self._fd >= 0:
            self.flush()
            os.close(self._fd)
            self._fd = -1


# ---- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """The prints of one rank, oldest first, and what the file says of itself."""

    path: Path
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


def read_ring(path: Path) -> Ring:
    """The ring at `path`. Raises `ChronicleError` when it is none, or of another version; a cut print is left out."""
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
    prints = sorted(_prints(blob), key=lambda one: one.seq)
    return Ring(path=path, rank=rank, capacity=capacity, header=header, prints=tuple(prints))


def _prints(blob: bytes) -> Iterator[Print]:
    for begin in range(HEADER_BYTES, len(blob) - PRINT_BYTES + 1, PRINT_BYTES):
        one = Print.unpack(blob[begin : begin + PRINT_BYTES])
        if one is not None:
            yield one


def rings_of(launch_dir: Path) -> dict[int, Ring]:
    """The rings of a launch by rank; empty where its prints were off, or its guard never saw a step."""
    rings = (read_ring(path) for path in sorted(launch_dir.glob("prints-*.ring")))
    return {ring.rank: ring for ring in rings}

"""TensorBoard event files with purge markers, written without TensorBoard.

One file a launch, named so that TensorBoard reads them in order; each begins with SessionLog.START at the first step of
its launch, upon which TensorBoard drops what an earlier file holds from that step on: what is left is the lineage.
Format: TFRecord (length, masked CRC-32C, data, masked CRC-32C) of tensorflow/core/util/event.proto.
"""

import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from chronicle.integrations.exports import Row
from chronicle.journal import Lineage

__all__ = ["write_tensorboard"]

CASTAGNOLI = 0x82F63B78
MASK_DELTA = 0xA282EAD8
FILE_VERSION = b"brain.Event:2"
SESSION_START = b"\x08\x01"  # SessionLog{status: START}


def write_tensorboard(rows: Iterable[Row], lineage: Lineage, directory: Path) -> int:
    """Write every launch, abandoned parts included: the markers purge them as TensorBoard reads. Returns the number of rows."""
    directory.mkdir(parents=True, exist_ok=True)
    starts = {span.number: (span.start_step or 0) + 1 for span in lineage.launches}
    count, current, file = 0, None, None
    try:
        for row in rows:
            if row.launch != current:
                if file is not None:
                    file.close()
                current = row.launch
                file = _begin(directory, row, starts.get(row.launch, row.step))
            assert file is not None
            _write(file, _event(row.time or 0.0, row.step, b"".join(_scalars(row))))
            count += 1
    finally:
        if file is not None:
            file.close()
    return count


def _begin(directory: Path, row: Row, start: int) -> BinaryIO:
    # TensorBoard sorts files by name and takes the first number as seconds: a counter keeps them in order.
    file = (directory / f"events.out.tfevents.{row.launch:010d}.chronicle").open("wb")
    _write(file, _double(1, row.time or 0.0) + _bytes(3, FILE_VERSION))
    _write(file, _event(row.time or 0.0, start, b"") + _bytes(7, SESSION_START))
    return file


def _scalars(row: Row) -> Iterator[bytes]:
    for name, value in row.values.items():
        yield _bytes(1, _bytes(1, name.encode("utf-8", "replace")) + b"\x15" + struct.pack("<f", _single(value)))


def _single(value: float) -> float:
    """TensorBoard keeps single precision; what does not fit is infinite there too."""
    try:
        struct.pack("<f", value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")
    return value


def _event(time: float, step: int, summary: bytes) -> bytes:
    return _double(1, time) + b"\x10" + _varint(step) + (_bytes(5, summary) if summary else b"")


def _double(number: int, value: float) -> bytes:
    return bytes([number << 3 | 1]) + struct.pack("<d", value)


def _bytes(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _write(file: BinaryIO, record: bytes) -> None:
    size = struct.pack("<Q", len(record))
    file.write(size + _masked_crc(size) + record + _masked_crc(record))


def _table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = value >> 1 ^ (CASTAGNOLI if value & 1 else 0)
        table.append(value)
    return tuple(table)


TABLE = _table()


def _masked_crc(data: bytes) -> bytes:
    value = 0xFFFFFFFF
    for byte in data:
        value = TABLE[(value ^ byte) & 255] ^ value >> 8
    value ^= 0xFFFFFFFF
    masked = ((value >> 15 | value << 17) & 0xFFFFFFFF) + MASK_DELTA & 0xFFFFFFFF
    return struct.pack("<I", masked)

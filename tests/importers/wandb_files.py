"""Session files as W&B's offline mode writes them, made by hand: frames of LevelDB's log around protobuf records."""

import json
import struct
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

BLOCK = 32_768


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def number(at: int, value: int) -> bytes:
    return varint(at << 3) + varint(value)


def block(at: int, content: bytes | str) -> bytes:
    content = content.encode() if isinstance(content, str) else content
    return varint(at << 3 | 2) + varint(len(content)) + content


def item(name: str, value: Any) -> bytes:
    return block(1, b"".join(block(2, part) for part in name.split("|")) + block(16, json.dumps(value)))


def history(values: Mapping[str, Any]) -> bytes:
    return block(2, b"".join(item(name, value) for name, value in values.items()))


def run_record(run_id: str, name: str, config: Mapping[str, Any], started: int, project: str = "p") -> bytes:
    settings = b"".join(item(key, value) for key, value in config.items())
    when = block(17, number(1, started) + number(2, 500_000_000))
    return block(17, block(1, run_id) + block(3, project) + block(4, settings) + block(8, name) + when)


def alert(title: str, text: str, level: str = "WARN") -> bytes:
    return block(10, block(1, title) + block(2, text) + block(3, level))


def finished(code: int = 0) -> bytes:
    return block(18, number(1, code))


def framed(records: Iterable[bytes]) -> bytes:
    out = bytearray(b":W&B\xe1\xbe\x00")
    for record in records:
        kind_of_first = True
        while True:
            left = BLOCK - len(out) % BLOCK
            if left < 7:
                out += bytes(left)
                left = BLOCK
            part, record = record[: left - 7], record[left - 7 :]
            kind = (1 if not record else 2) if kind_of_first else (4 if not record else 3)
            out += struct.pack("<IHB", zlib.crc32(part, zlib.crc32(bytes([kind]))), len(part), kind) + part
            kind_of_first = False
            if not record:
                break
    return bytes(out)


def write_session(directory: Path, name: str, records: Iterable[bytes]) -> Path:
    """`wandb/offline-run-…/run-ID.wandb` as W&B names it."""
    place = directory / "wandb" / f"offline-run-{name}"
    place.mkdir(parents=True)
    path = place / f"run-{name}.wandb"
    path.write_bytes(framed(records))
    return path

"""W&B's own log of a run, `run-<id>.wandb`, as its offline mode leaves it: without the wandb package and without an account.

Format: the record framing of LevelDB's log (github.com/google/leveldb/blob/main/doc/log_format.md) in blocks of 32 KiB behind a
head of 7 bytes (`:W&B`, 0xBEE1, version 0), CRC-32 of zlib over type and data; a record is a protobuf message `Record` of
wandb/proto/wandb_internal.proto. The wandb package reads these files in a compiled program only, so there is no reader to call.

A file is one session (one `wandb.init`). Sessions with the same id are launches of one run. A file ends where a record is
cut or its check sum does not hold (its writer was stopped, or still writes), and what lies behind is said. History is read
as W&B's JSON history is: where a record names the trainer's own step, that one counts (`points_of_records`).
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chronicle.errors import UsageProblem
from chronicle.metrics.log import Point, number_rows, points_of_launches, unread_bytes
from chronicle.metrics.records import points_of_records

HEAD = b":W&B\xe1\xbe\x00"
BLOCK = 32_768
FRAME = 7  # CRC (4), length (2), type (1)
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4
HISTORY, CONFIG, STATS, ALERT, RUN, EXIT = 2, 5, 7, 10, 17, 18  # fields of `Record`
PLACES = ("*.wandb", "*/*.wandb", "wandb/*/*.wandb")  # in a run's directory, in `wandb/`, in the directory of a script
SUFFIX = ".wandb"


@dataclass(slots=True, kw_only=True)
class WandbSession:
    """What one file says: who the run is, its settings, its points in file order, its alerts, and how it ended."""

    path: Path
    run_id: str = ""
    project: str = ""
    name: str = ""
    started: float | None = None  # seconds since the epoch
    branched_from: tuple[str, int] | None = None  # a fork or rewind: another run's id, and its step
    config: dict[str, Any] = field(default_factory=dict)
    points: list[Point] = field(default_factory=list)
    alerts: list[tuple[str, str, str]] = field(default_factory=list)  # title, text, level
    exit_code: int | None = None
    is_whole: bool = False  # its last record says that the run was finished
    unread: int = 0  # bytes behind the last record that could be read
    system_samples: int = 0  # records of GPU, memory and disk, which are not points of the run


def is_wandb_file(path: Path) -> bool:
    """Whether a file is a session of W&B, by its first bytes."""
    try:
        with path.open("rb") as file:
            return file.read(len(HEAD)) == HEAD
    except OSError:
        return False


def wandb_files(path: Path) -> list[Path]:
    """The session files that a path means: a file, a run's directory, `wandb/`, or a directory that holds `wandb/`."""
    if path.is_file():
        return [path] if path.suffix == SUFFIX or is_wandb_file(path) else []
    found = {file.resolve(): file for place in PLACES for file in sorted(path.glob(place)) if file.is_file()}
    return sorted(found.values())


def read_sessions(path: Path) -> list[WandbSession]:
    """The sessions that lie there, in the order of their start. Raises UsageProblem for a file that is none."""
    sessions = [read_session(file) for file in wandb_files(path)]
    return sorted(sessions, key=lambda session: (session.started or 0.0, str(session.path)))


def read_wandb(path: Path, left_out: list[str] | None = None) -> Iterator[Point]:
    """Yield the points of one run, each session a launch; raises UsageProblem where several runs lie there.

    `left_out` gets a sentence for each file that could not be read to its end.
    """
    sessions = read_sessions(path)
    runs = {(one.project, one.run_id): one.path.parent for one in sessions}
    if len(runs) > 1:
        some = ", ".join(str(place) for place in list(runs.values())[:4])
        raise UsageProblem(f"`{path}` holds {len(runs)} runs of W&B", f"name one of their directories: {some}")
    if left_out is not None:
        left_out += [unread_bytes(session.path, session.unread) for session in sessions if session.unread]
    yield from number_rows(points_of_launches([session.points for session in sessions]))


def read_session(path: Path) -> WandbSession:
    """Read one file. Raises UsageProblem where it is no file of W&B, OSError where it cannot be read."""
    session = WandbSession(path=path)
    records: list[Mapping[str, Any]] = []
    for record in _records(path, session):
        try:
            _take(session, record, records)
        except (IndexError, ValueError, struct.error):
            continue  # a damaged record costs itself only
    session.points = list(points_of_records(records))
    session.config.pop("_wandb", None)
    return session


def _take(session: WandbSession, record: bytes, history: list[Mapping[str, Any]]) -> None:
    for number, _, value in fields_of(record):
        if not isinstance(value, bytes):
            continue
        if number == HISTORY:
            history.append(_history(value))
        elif number == RUN:
            _take_run(session, value)
        elif number == CONFIG:
            _take_config(session.config, value)
        elif number == ALERT:
            texts = _texts(value)
            session.alerts.append((texts.get(1, ""), texts.get(2, ""), texts.get(3, "")))
        elif number == EXIT:
            session.is_whole = True
            code = next((v for n, _, v in fields_of(value) if n == 1 and isinstance(v, int)), 0)
            session.exit_code = code - (1 << 64) if code >> 63 else code
        elif number == STATS:
            session.system_samples += 1


def _history(message: bytes) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for number, _, value in fields_of(message):
        if number == 1 and isinstance(value, bytes):
            _put(found, *_item(value))
        elif number == 2 and isinstance(value, bytes) and "_step" not in found:  # HistoryStep: files of older versions
            found["_step"] = next((v for n, _, v in fields_of(value) if n == 1), 0)
    found.pop("_runtime", None)  # W&B's own clock, in every record: no channel
    return found


def _item(message: bytes) -> tuple[list[str], Any]:
    """The path of names and the value of a HistoryItem or ConfigItem; a value that is no JSON is None."""
    texts = _texts(message)
    nested = []
    for number, _, value in fields_of(message):
        if number == 2 and isinstance(value, bytes):
            nested.append(value.decode("utf-8", "replace"))
    names = nested or [texts.get(1, "")]
    try:
        return names, json.loads(texts.get(16, "null"))
    except (ValueError, RecursionError):
        return names, None


def _put(into: dict[str, Any], names: list[str], value: Any) -> None:
    for name in names[:-1]:
        inner = into.get(name)
        if not isinstance(inner, dict):
            inner = into[name] = {}
        into = inner
    into[names[-1]] = value


def _take_run(session: WandbSession, message: bytes) -> None:
    texts = _texts(message)
    session.run_id, session.project = texts.get(1, session.run_id), texts.get(3, session.project)
    session.name = texts.get(8, session.name)
    for number, _, value in fields_of(message):
        if number == 4 and isinstance(value, bytes):
            _take_config(session.config, value)
        elif number == 17 and isinstance(value, bytes):
            parts = {n: v for n, _, v in fields_of(value) if isinstance(v, int)}
            session.started = parts.get(1, 0) + parts.get(2, 0) / 1e9
        elif number == 23 and isinstance(value, bytes):
            at = next(
                (struct.unpack("<d", v)[0] for n, _, v in fields_of(value) if n == 2 and isinstance(v, bytes)), 0.0
            )
            session.branched_from = (_texts(value).get(1, ""), int(at))


def _take_config(config: dict[str, Any], message: bytes) -> None:
    for number, _, value in fields_of(message):
        if number == 1 and isinstance(value, bytes):
            names, found = _item(value)
            _put(config, names, found)


def _texts(message: bytes) -> dict[int, str]:
    return {n: v.decode("utf-8", "replace") for n, kind, v in fields_of(message) if kind == 2 and isinstance(v, bytes)}


def _records(path: Path, session: WandbSession) -> Iterator[bytes]:
    """Yield the whole records of a file, until one is cut or damaged; `session.unread` counts what lies behind."""
    size = session.unread = path.stat().st_size
    with path.open("rb") as file:
        if file.read(len(HEAD)) != HEAD:
            raise UsageProblem(f"`{path}` is no log of W&B: its first bytes are not `:W&B`", "name a run-*.wandb")
        at, parts = len(HEAD), bytearray()
        while True:
            left = BLOCK - at % BLOCK
            if left < FRAME:
                file.read(left)
                at += left
            head = file.read(FRAME)
            if len(head) < FRAME:
                return
            check, length, kind = struct.unpack("<IHB", head)
            data = file.read(length)
            if (
                len(data) < length
                or kind not in (FULL, FIRST, MIDDLE, LAST)
                or zlib.crc32(data, zlib.crc32(head[6:])) != check
            ):
                return
            at += FRAME + length
            if kind in (FULL, FIRST):
                parts.clear()
            parts += data
            if kind in (FULL, LAST):
                session.unread = size - at
                yield bytes(parts)


# ---- protobuf's wire format (protobuf.dev/programming-guides/encoding), as far as these records need it: no schema, no package

VARINT, FIXED_64, BYTES, FIXED_32 = 0, 1, 2, 5

Field = tuple[int, int, bytes | int]


def fields_of(data: bytes) -> Iterator[Field]:
    """Yield (number, wire type, value) of every field; raises ValueError or IndexError where the message is damaged."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == VARINT:
            value, at = _varint(data, at)
            yield number, kind, value
            continue
        if kind == BYTES:
            size, at = _varint(data, at)
        elif kind in (FIXED_64, FIXED_32):
            size = 8 if kind == FIXED_64 else 4
        else:
            raise ValueError(f"wire type {kind}")
        if at + size > len(data):
            raise ValueError("field runs past its message")
        yield number, kind, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("varint too long")

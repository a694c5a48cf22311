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
from chronicle.metrics.text import read_head

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


def wandb_files(path: Path) -> list[Path]:
    """The session files that a path means: a file, a run's directory, `wandb/`, or a directory that holds `wandb/`."""
    if path.is_file():
        return [path] if path.suffix == SUFFIX or read_head(path).startswith(HEAD) else []
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
    history: list[Mapping[str, Any]] = []
    for record in _records(path, session):
        try:
            _take(session, fields_of(record), history)
        except (IndexError, ValueError, struct.error):
            continue  # a damaged record costs itself only
    session.points = list(points_of_records(history))
    session.config.pop("_wandb", None)
    return session


def _take(session: WandbSession, record: Fields, history: list[Mapping[str, Any]]) -> None:
    for message in record.messages(HISTORY):
        found: dict[str, Any] = {}
        _put_items(found, message)
        for step in message.messages(2):  # files of older versions
            found.setdefault("_step", step.number(1))
        found.pop("_runtime", None)  # W&B's own clock, in every record: no channel
        history.append(found)
    for message in record.messages(RUN):
        _take_run(session, message)
    for message in record.messages(CONFIG):
        _put_items(session.config, message)
    for message in record.messages(ALERT):
        session.alerts.append((message.text(1), message.text(2), message.text(3)))
    for message in record.messages(EXIT):
        session.is_whole = True
        code = message.number(1)
        session.exit_code = code - (1 << 64) if code >> 63 else code
    session.system_samples += len(record.messages(STATS))


def _take_run(session: WandbSession, message: Fields) -> None:
    session.run_id = message.text(1) or session.run_id
    session.project = message.text(3) or session.project
    session.name = message.text(8) or session.name
    for config in message.messages(4):
        _put_items(session.config, config)
    for started in message.messages(17):
        session.started = started.number(1) + started.number(2) / 1e9
    for parent in message.messages(23):
        at = parent.get(2)
        step = struct.unpack("<d", at[-1])[0] if at and isinstance(at[-1], bytes) else 0.0
        session.branched_from = (parent.text(1), int(step))


def _put_items(found: dict[str, Any], message: Fields) -> None:
    """Add the items of a history or a config, nested as their names are; a value that is no JSON is None."""
    for item in message.messages(1):
        nested = [str(name, "utf-8", "replace") for name in item.get(2, ()) if isinstance(name, bytes)]
        *folders, name = nested or [item.text(1)]
        into = found
        for folder in folders:
            if not isinstance(into.get(folder), dict):
                into[folder] = {}
            into = into[folder]
        try:
            into[name] = json.loads(item.text(16) or "null")
        except (ValueError, RecursionError):
            into[name] = None


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

VARINT, BYTES = 0, 2
FIXED = {1: 8, 5: 4}  # bytes of a wire type


class Fields(dict[int, list[bytes | int]]):
    """The fields of a message by their numbers, each as often as it is there."""

    def number(self, number: int) -> int:
        """A field that is an integer; 0 where it is not there."""
        return next((value for value in self.get(number, ()) if isinstance(value, int)), 0)

    def text(self, number: int) -> str:
        """A field that is a text; empty where it is not there."""
        return next((str(value, "utf-8", "replace") for value in self.get(number, ()) if isinstance(value, bytes)), "")

    def messages(self, number: int) -> list[Fields]:
        """The messages in a field; raises ValueError or IndexError where one is damaged."""
        return [fields_of(value) for value in self.get(number, ()) if isinstance(value, bytes)]


def fields_of(data: bytes) -> Fields:
    """Take a message apart; raises ValueError or IndexError where it is damaged."""
    found, at = Fields(), 0
    while at < len(data):
        key, at = _varint(data, at)
        values = found.setdefault(key >> 3, [])
        if key & 7 in FIXED:
            size = FIXED[key & 7]
        else:
            size, at = _varint(data, at)
        if key & 7 == VARINT:
            values.append(size)
            continue
        if at + size > len(data) or key & 7 not in (BYTES, *FIXED):
            raise ValueError(f"a field of wire type {key & 7} runs past its message")
        values.append(data[at : at + size])
        at += size
    return found


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

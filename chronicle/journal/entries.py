"""One line of the journal: the envelope that all entries share, with `to_json` and `from_json`.

The envelope has a version of its own. What a kind of entry says lies in `data` (`chronicle.journal.events`). An unknown
version of the envelope is refused, an unknown kind is kept: a newer program may have written it.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from chronicle.errors import JournalError

VERSION = 1
WORDS = {str: "text", int: "a whole number", dict: "an object"}
FIRST_PREV = "0" * 64  # `prev` of a writer's first line


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One entry. `prev` is the sha256 of this writer's previous line, `refs` are the ids of entries that this one is about."""

    id: str  # ULID: 48 bits of milliseconds, 80 random, Crockford base 32
    ts: str  # RFC 3339 with offset
    run: str
    writer: str
    seq: int
    prev: str
    kind: str
    step: int | None = None  # optimizer steps completed
    launch: int | None = None
    title: str = ""
    refs: tuple[str, ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    heads: Mapping[str, str] = field(default_factory=dict)  # other writers -> digest of their last line; in a first entry
    v: int = VERSION

    def to_json(self) -> str:
        """The line without its newline: compact, keys in a fixed order, non-ASCII kept readable."""
        record: dict[str, Any] = {"v": self.v, "id": self.id, "ts": self.ts, "run": self.run, "kind": self.kind}
        if self.step is not None:
            record["step"] = self.step
        if self.launch is not None:
            record["launch"] = self.launch
        if self.title:
            record["title"] = self.title
        if self.refs:
            record["refs"] = list(self.refs)
        if self.data:
            record["data"] = self.data
        if self.heads:
            record["heads"] = dict(self.heads)
        record |= {"writer": self.writer, "seq": self.seq, "prev": self.prev}
        return _dump(record)

    @classmethod
    def from_json(cls, line: str) -> "Entry":
        """Parse one line; raises `JournalError` saying what is wrong with it."""
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as problem:
            raise JournalError(f"not JSON: {problem}") from problem
        if not isinstance(record, dict):
            raise JournalError(f"expected an object, found {type(record).__name__}")
        version = record.get("v")
        if version != VERSION:
            raise JournalError(
                f"entry version {version!r}: expected {VERSION}", "a newer chronicle wrote it: update chronicle"
            )
        try:
            return cls(
                id=_field(record, "id", str),
                ts=_field(record, "ts", str),
                run=_field(record, "run", str),
                writer=_field(record, "writer", str),
                seq=_field(record, "seq", int),
                prev=_field(record, "prev", str),
                kind=_field(record, "kind", str),
                step=None if record.get("step") is None else _field(record, "step", int),
                launch=None if record.get("launch") is None else _field(record, "launch", int),
                title=str(record.get("title", "")),
                refs=tuple(map(str, record.get("refs", ()))),
                data=_field(record, "data", dict) if "data" in record else {},
                heads={} if record.get("heads") is None else _field(record, "heads", dict),
            )
        except TypeError as problem:
            raise JournalError(f"malformed entry: {problem}") from problem


def _dump(record: Mapping[str, Any]) -> str:
    """One line of strict JSON: NaN and infinities as strings, file names that are not UTF-8 as escapes."""
    try:
        line = json.dumps(record, ensure_ascii=False, separators=(",", ":"), default=str, allow_nan=False)
    except ValueError:  # JSON has no NaN; the metrics log writes the same three words
        return _dump(_without_non_finite(record))
    try:
        line.encode("utf-8")
    except UnicodeEncodeError:  # a file name that is not UTF-8 arrives as lone surrogates: escaped, they survive
        return json.dumps(record, ensure_ascii=True, separators=(",", ":"), default=str, allow_nan=False)
    return line


def _without_non_finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)
    if isinstance(value, Mapping):
        return {key: _without_non_finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_non_finite(inner) for inner in value]
    return value


def _field(record: Mapping[str, Any], key: str, kind: type) -> Any:
    value = record.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise JournalError(f"field `{key}` is {value!r}: expected {WORDS[kind]}")
    return value

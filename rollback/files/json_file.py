"""JSON files of a checkpoint, read piece by piece: a large one takes little memory.

Reading builds a part with `json` if it fits into a piece and
walks into it if it does not. The walker is there for memory: a Trainer's log of 500,000 records (66 MB of
`trainer_state.json`) takes 28 MB here and 253 MB with `json.load`; a hostile list of 40 MB takes 1,017 MB there.
`tests/attacks/test_greedy.py` holds `inspect` and `verify` to 100 MB.
"""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias

from rollback.errors import UnreadableFile
from rollback.files.torch_zip import read_at

Keys: TypeAlias = tuple[str | int, ...]

_SPACE = re.compile(r"[ \t\n\r]*")


# --- JSON read piece by piece

_MAX_JSON_BYTES = 96 * 2**20
PIECE = 2**18  # characters that one part may have: built, they take up to twenty times as much
READ = 2**19
_MAX_LEVELS = 16  # of containers that do not fit into a piece
_MAX_VALUES = 6_000_000  # half a million records of the Trainer's log have three
_MAX_STEPS = 250_000  # parts that have to be looked at one by one
_MAX_FAILURES = 16  # of reading many members at once, in one container
_MEMBER = re.compile(r'[ \t\n\r]*"(?:[^"\\]|\\.)*"[ \t\n\r]*:[ \t\n\r]*.')
_CLOSER = {"{": "}", "[": "]"}


@dataclass(frozen=True, slots=True)
class JsonPart:
    """One value, an upper bound of its memory, and its bytes `[start, end)`, -1 where many values were read at once."""

    keys: Keys
    value: Any
    num_bytes: int
    start: int = -1
    end: int = -1


def json_parts(
    fd: int, offset: int, length: int, *, levels: int = 1, wanted: Callable[[Keys], bool] = lambda keys: True
) -> Iterator[JsonPart]:
    """The parts of the JSON at `[offset, offset + length)`: members of its outermost `levels`, deeper where they are large.

    Parts in the outermost levels come one by one, with their positions. A part whose keys are not `wanted` is checked but
    not returned. Raises `UnreadableFile` for invalid JSON.
    """
    if length > _MAX_JSON_BYTES:
        raise UnreadableFile(f"{length} bytes of JSON: at most {_MAX_JSON_BYTES} are read")
    walk = _Walk(fd, offset, offset + length, levels, wanted)
    with _no_collector():
        yield from walk.value(())
        walk.end()


def put_part(tree: dict[str | int, Any], part: JsonPart) -> None:
    """Put a part into `tree` at its key path; parts must come in file order."""
    target: Any = tree
    for key, below in pairwise(part.keys):
        target = _placed(target, key, [] if isinstance(below, int) else {})
    _placed(target, part.keys[-1], part.value)


def _placed(target: Any, key: str | int, value: object) -> Any:
    if isinstance(target, dict):
        return target.setdefault(key, value)
    if key == len(target):
        target.append(value)
    return target[key]


def _memory_of(text: str) -> int:
    """Upper bound of the memory this JSON takes once it is built; counting is much faster than building."""
    count = text.count
    return 64 + len(text) + 72 * count("[") + 200 * count("{") + 40 * count(",") + 100 * count(":") + 30 * count('"')


@contextmanager
def _no_collector() -> Iterator[None]:
    """Pause the garbage collector: JSON values have no cycles, and it would walk all of them again and again."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@dataclass(slots=True)
class _Walk:
    """The position in the stream: `text` begins at byte `base`, the next character is `text[at]`."""

    fd: int
    base: int
    stop: int
    levels: int
    wanted: Callable[[Keys], bool]
    text: str = ""
    at: int = 0
    steps: int = 0
    values: int = 0
    cost: int = 0  # in memory, of each of the members that were read at once
    scan: Callable[[str, int], tuple[Any, int]] = field(default_factory=lambda: json.JSONDecoder().raw_decode)

    def value(self, keys: Keys) -> Iterator[JsonPart]:
        opener = self.peek()
        self.steps += 1
        if self.steps > _MAX_STEPS:
            raise self.damage(f"more than {_MAX_STEPS} separate values")
        if not (opener in _CLOSER and len(keys) < self.levels):
            start = self.base + self.at
            found = self.piece()
            if found is not None:
                if self.wanted(keys):
                    end = self.base + self.at
                    num_bytes = _memory_of(self.text[self.at - (end - start) : self.at])
                    yield JsonPart(keys, found[0], num_bytes, start, end)
                return
        if opener not in _CLOSER or len(keys) >= _MAX_LEVELS:
            raise self.damage(f"no value, or one of more than {PIECE} bytes")
        yield from self.members(keys, opener)

    def members(self, keys: Keys, opener: str) -> Iterator[JsonPart]:
        """The parts of the container that begins here."""
        closer, index, failures = _CLOSER[opener], 0, _MAX_FAILURES if len(keys) < self.levels else 0
        self.at += 1
        if self.peek() == closer:
            self.at += 1
            return
        while True:
            run = self.run(opener) if failures < _MAX_FAILURES else None
            if run is not None:
                items = run.items() if isinstance(run, dict) else enumerate(run, index)
                if self.wanted((*keys, "" if isinstance(run, dict) else index)):
                    yield from (JsonPart((*keys, key), value, self.cost) for key, value in items)
                index += len(run)
            else:
                failures += 1
                yield from self.value((*keys, self.key() if opener == "{" else index))
                index += 1
            mark = self.peek()
            self.at += 1
            if mark == closer:
                return
            if mark != ",":
                raise self.damage(f"`,` or `{closer}` was expected")
            self.peek()

    def run(self, opener: str) -> dict[str, object] | list[object] | None:
        """The members up to a comma some way ahead, built at once; None when that comma does not lie between two of them.

        From the start of a member there is one reading only: if the brackets close at the cut, it was a right one.
        """
        self.fill()
        first = _MEMBER.match(self.text, self.at) if opener == "{" else None
        mark = {"{": "},", "[": "],"}.get(self.text[first.end() - 1 if first else self.at], ",")
        cut = self.text.rfind(mark, self.at, self.at + PIECE) + len(mark) - 1
        if cut < self.at + len(mark):
            return None
        text = f"{opener}{self.text[self.at : cut]}{_CLOSER[opener]}"
        self.values += text.count(",")
        if self.values > _MAX_VALUES:
            raise self.damage(f"more than {_MAX_VALUES} values")
        found = self.built(text, 0)
        if found is None or found[1] != len(text):
            return None
        self.at = cut
        self.cost = _memory_of(text) // max(1, len(found[0]))
        return found[0]  # type: ignore[no-any-return]

    def key(self) -> str:
        found = self.piece() if self.peek() == '"' else None
        if found is None or self.peek() != ":":
            raise self.damage("a key was expected")
        self.at += 1
        return str(found[0])

    def piece(self) -> tuple[Any, int] | None:
        """The value that begins here, and where it ends; None when it is none or goes on beyond what is at hand."""
        self.fill()
        found = self.built(self.text, self.at)
        if found is None or (found[1] == len(self.text) and self.base + len(self.text) < self.stop):
            return None
        self.at = found[1]
        return found

    def built(self, text: str, at: int) -> tuple[Any, int] | None:
        try:
            found = self.scan(text, at)
            if text.isascii() or text[at : found[1]].isascii():
                return found
            return self.scan(text[at : found[1]].encode("latin-1").decode("utf-8"), 0)[0], found[1]
        except (ValueError, RecursionError):
            return None

    def peek(self) -> str:
        """The next character that is no space, "" at the end."""
        while True:
            found = _SPACE.match(self.text, self.at)
            self.at = found.end() if found else self.at
            if self.at < len(self.text):
                return self.text[self.at]
            if not self.more():
                raise self.damage("it ends too early")

    def fill(self) -> None:
        while len(self.text) - self.at < PIECE and self.more():
            pass

    def more(self) -> bool:
        """Read on; False at the end."""
        after = self.base + len(self.text)
        if after >= self.stop:
            return False
        raw = read_at(self.fd, after, min(READ, self.stop - after))
        self.text = self.text[self.at :] + raw.decode("latin-1")
        self.base, self.at = self.base + self.at, 0
        return True

    def end(self) -> None:
        while _SPACE.fullmatch(self.text, self.at):
            if not self.more():
                return
        raise self.damage("something follows its end")

    def damage(self, what: str) -> UnreadableFile:
        return UnreadableFile(f"invalid JSON at byte {self.base + self.at}: {what}")

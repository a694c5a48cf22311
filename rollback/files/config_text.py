"""Config files that people write (YAML, TOML, JSON): where each number stands, and the text with some of them replaced.

A launch takes its LR from such a file, so a rollback edits it. Comments, order, indentation and line ends stay: only the
characters of the number change. What this reader does not know exactly it refuses, with the line:

    numbers("optimizer:\\n  lr: 3e-4  # peak\\n", "yaml")   # {("optimizer", "lr"): Number(value=0.0003, start=17, end=21)}

JSON and TOML are read by the parsers of the standard library, and a number is found by changing it. There is none for YAML:
what is read is block mappings and lists, and flow collections on one line. Anchors, aliases, merges and several documents are
refused, because one number may then stand for several fields. Other multi-line values are passed over by their indentation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollback.files.json_file import Keys

MAX_CHARACTERS = 1 << 20
KINDS: Mapping[str, str] = {".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".json": "json"}


class NotPlainConfig(ValueError):
    """The text cannot be read exactly; the message says where and why."""


class NotPlainJson(NotPlainConfig):
    """The text is not a JSON object, names a key twice, or is too large or too deep; the message says which."""


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A config file as it is now, and `origin`: who named it as the config of the next launch."""

    path: str  # absolute
    text: str
    origin: str

    @classmethod
    def read(cls, path: Path, origin: str) -> ConfigFile:
        """The file behind all links, which is the one that an edit replaces. Raises `OSError` or `NotPlainConfig`."""
        real = path.resolve(strict=True)
        if real.stat().st_size > MAX_CHARACTERS:
            raise NotPlainConfig(f"larger than {MAX_CHARACTERS} bytes: expected a config")
        try:
            return cls(path=str(real), text=real.read_bytes().decode("utf-8"), origin=origin)
        except UnicodeDecodeError:
            raise NotPlainConfig("it is not text") from None


_ENDS = (".yaml", ".yml", ".toml", ".json", ".py")


def files_named_by(argv: Sequence[str], cwd: Path, origin: str) -> tuple[ConfigFile, ...]:
    """The configs and scripts that a command names."""
    found: dict[str, ConfigFile] = {}
    for word in map(str, argv):
        for text in (word, word.partition("=")[2]):
            if not text.endswith(_ENDS):
                continue
            try:
                file = ConfigFile.read(cwd / text, origin)
            except (OSError, ValueError):
                continue  # whatever it is, no person wrote it as a config
            found.setdefault(file.path, file)
    return tuple(found.values())


@dataclass(frozen=True, slots=True)
class Number:
    """A number in the text, at `[start, end)`. A quoted one is the text between its quotes."""

    value: float
    start: int
    end: int


def config_kind(path: str) -> str | None:
    """"yaml", "toml" or "json" by the end of the file's name; None for another kind of file."""
    return next((kind for end, kind in KINDS.items() if path.lower().endswith(end)), None)


def numbers(text: str, kind: str) -> dict[Keys, Number]:
    """Every number of a config by its key path; raises `NotPlainConfig`."""
    if len(text) > MAX_CHARACTERS:
        raise NotPlainConfig(f"larger than {MAX_CHARACTERS} characters")
    try:
        if kind == "yaml":
            return _Yaml(text).read()
        return dict(_probed(text, *((_TOML_FIELD, _parse_toml) if kind == "toml" else (_JSON_NUMBER, parse_object))))
    except RecursionError:
        raise NotPlainConfig("nested too deeply") from None


def replace_config_numbers(text: str, kind: str, values: Mapping[Keys, float | int]) -> str:
    """The text with these numbers replaced, everything else as it was; raises `NotPlainConfig`."""
    found = numbers(text, kind)
    absent = [keys for keys in values if keys not in found]
    if absent:
        raise NotPlainConfig(f"`{'.'.join(map(str, absent[0]))}` is no number that can be edited in place")
    edited = text
    for keys, value in sorted(values.items(), key=lambda item: -found[item[0]].start):
        edited = edited[: found[keys].start] + number_text(value, kind) + edited[found[keys].end :]
    after = numbers(edited, kind)
    wanted = {keys: float(values.get(keys, number.value)) for keys, number in found.items()}
    if {keys: number.value for keys, number in after.items()} != wanted:
        raise NotPlainConfig("the edited text reads back with other numbers than the planned ones")
    return edited


def number_text(value: float | int, kind: str) -> str:
    """A number as this kind of file holds it: YAML 1.1 takes `1e-05` for text, so it becomes `1.0e-05`."""
    text = json.dumps(value)
    if kind == "json" or "e" not in text or "." in text:
        return text
    mantissa, _, exponent = text.partition("e")
    return f"{mantissa}.0e{exponent}"


# --- JSON and TOML: candidates are found in the text, the parser of the standard library decides

_JSON_NUMBER = re.compile(r'"(?:[^"\\]|\\.)*"|(?P<number>-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)')
_TOML_NUMBER = r"[-+]?(?:\d[\d_]*)(?:\.\d[\d_]*)?(?:[eE][-+]?\d[\d_]*)?"
_TOML_FIELD = re.compile(rf"[A-Za-z0-9_\-\"']\s*=\s*(?P<number>{_TOML_NUMBER})(?=\s*(?:[,}}#\r\n]|$))")
_PROBE = "7.318530717958e-13"  # no config holds it
_MOST_PARSED = 100 << 20  # characters


def parse_object(text: str) -> dict[str, Any]:
    """The object in the text; a key that occurs twice is refused, since readers differ on which one counts."""
    if len(text) > MAX_CHARACTERS:
        raise NotPlainJson(f"larger than {MAX_CHARACTERS} characters")
    try:
        found = json.loads(text, object_pairs_hook=_without_twins)
    except RecursionError:
        raise NotPlainJson("nested too deeply") from None
    except json.JSONDecodeError as problem:
        raise NotPlainJson(f"{problem.msg} in line {problem.lineno}") from None
    if not isinstance(found, dict):
        raise NotPlainJson("not an object")
    return found


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twins = sorted({key for key, _ in pairs if sum(key == other for other, _ in pairs) > 1})
        raise NotPlainJson(f"the key {twins[0]!r} appears twice")
    return found


def _parse_toml(text: str) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as problem:
        raise NotPlainConfig(f"invalid TOML: {problem}") from None


def _probed(
    text: str, candidates: re.Pattern[str], parse: Callable[[str], dict[str, Any]]
) -> Iterator[tuple[Keys, Number]]:
    """Each number that the parser sees and that a change in the text changes alone.

    A candidate is put to the test: with other digits in its place the parser must give the same tree but for one number, which
    tells its key path too, whatever table, quotes or multi-line text it stands in.
    """
    before = dict(_leaves(parse(text), ()))
    spans = [match.span("number") for match in candidates.finditer(text) if match["number"]]
    if len(spans) * len(text) > _MOST_PARSED:
        raise NotPlainConfig(f"{len(spans)} numbers in {len(text)} characters: too large to be edited exactly")
    for start, end in spans:
        try:
            after = dict(_leaves(parse(f"{text[:start]}{_PROBE}{text[end:]}"), ()))
        except NotPlainConfig:
            continue
        changed = [keys for keys, value in after.items() if keys not in before or repr(before[keys]) != repr(value)]
        value = before.get(changed[0]) if len(changed) == 1 else None
        if before.keys() == after.keys() and isinstance(value, int | float) and not isinstance(value, bool):
            yield changed[0], Number(float(value), start, end)


def _leaves(tree: Any, keys: Keys) -> Iterator[tuple[Keys, object]]:
    if isinstance(tree, dict | list):
        for key, part in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _leaves(part, (*keys, key))
    else:
        yield keys, tree


# --- YAML: block mappings and lists by indentation, flow collections on one line

_KEY = re.compile(r"""(?P<key>"[^"\\]*"|'[^']*'|[^\s\-?:,\[\]{}#&*!|>'"%@`][^#\r\n]*?|-[^\s#][^#\r\n]*?)\s*:(?=\s|$)""")
_PLAIN = re.compile(r"[-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_SHARED = re.compile(r"(?:^|[\s\[,{:-])(?:&[\w.-]+|\*[\w.-]+|<<\s*:)(?=[\s,\]}]|$)")


class _Yaml:
    """Reads one document line by line. `lines` are (number, offset, text without line end)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.lines: list[tuple[int, int, str]] = []
        at = 0
        for number, line in enumerate(text.splitlines(keepends=True), start=1):
            self.lines.append((number, at, line.rstrip("\r\n")))
            at += len(line)
        self.at = 0
        self.found: dict[Keys, Number] = {}

    def read(self) -> dict[Keys, Number]:
        self._refuse_shared()
        indent = self._peek()
        if indent is not None:
            self._node(indent, ())
        if self._peek() is not None:
            self._refuse("is indented less than what stands before it")
        return self.found

    def _refuse(self, why: str) -> None:
        number = self.lines[min(self.at, len(self.lines) - 1)][0]
        raise NotPlainConfig(f"line {number} {why}")

    def _refuse_shared(self) -> None:
        begun = False
        for at, (_, _, line) in enumerate(self.lines):
            self.at, bare = at, _bare(line)
            if bare.startswith(("---", "...")):
                if begun or bare.strip() not in ("---", "..."):
                    self._refuse("begins another document")
                self.lines[at] = (at + 1, self.lines[at][1], "")
            elif bare.startswith("%"):
                self._refuse("is a directive")
            elif _SHARED.search(bare):
                self._refuse("holds an anchor, an alias or a merge: one number may stand for several fields")
            begun = begun or bool(bare.strip())
        self.at = 0

    def _peek(self) -> int | None:
        """The indentation of the next line with content; None at the end."""
        while self.at < len(self.lines):
            line = self.lines[self.at][2]
            bare = _bare(line)
            if bare.strip():
                indent = len(line) - len(line.lstrip(" "))
                if line[indent] == "\t":
                    self._refuse("is indented with a tab")
                return indent
            self.at += 1
        return None

    def _node(self, indent: int, keys: Keys, *, only_list: bool = False) -> None:
        """The mapping or list whose entries begin at this indentation.

        `only_list`: a list that is not indented under its key ends at the next key.
        """
        index, seen = 0, set[str]()
        while (found := self._peek()) is not None and found >= indent:
            _, offset, line = self.lines[self.at]
            if found > indent:
                self._refuse("is indented more than its neighbours")
            rest = line[indent:]
            if rest == "-" or rest.startswith("- "):
                self._item(indent, offset, rest, (*keys, index))
                index += 1
                continue
            if only_list:
                return
            match = _KEY.match(rest)
            if match is None:
                self._refuse("is neither `key: value` nor an item of a list")
                return
            key = _unquoted(match["key"])
            if key in seen:
                self._refuse(f"names `{key}` a second time")
            seen.add(key)
            self._value(indent, offset + indent + match.end(), rest[match.end() :], (*keys, key))

    def _item(self, indent: int, offset: int, rest: str, keys: Keys) -> None:
        inner = rest[1:]
        width = 1 + len(inner) - len(inner.lstrip(" "))
        content = rest[width:]
        if _bare(content).strip() and (_KEY.match(content) or content.startswith("- ")):
            number, at, line = self.lines[self.at]
            self.lines[self.at] = (number, at, " " * (indent + width) + line[indent + width :])
            self._node(indent + width, keys)
        else:
            self._value(indent, offset + indent + 1, inner, keys)

    def _value(self, indent: int, offset: int, rest: str, keys: Keys) -> None:
        """The value after a colon or a dash; `offset` is where `rest` begins in the text."""
        bare = _bare(rest)
        self.at += 1
        if not bare.strip():
            below = self._peek()
            deeper = below is not None and below > indent
            is_list = below == indent and self.lines[self.at][2][indent:].startswith("-") and isinstance(keys[-1], str)
            if below is not None and (deeper or is_list):
                self._node(below, keys, only_list=is_list)
            return
        start = offset + len(rest) - len(rest.lstrip())
        value = bare.strip()
        if value[0] in "|>":
            self._skip(indent)
        elif value[0] in "[{":
            end = self._flow(start, start + len(value), keys)
            if end != start + len(value):
                self.at -= 1
                self._refuse("holds a flow collection that does not end on it")
        else:
            if (below := self._peek()) is not None and below > indent:
                self._skip(indent)  # a plain or quoted text that goes on
            elif value[0] in "\"'" and (len(value) < 2 or value[-1] != value[0]):
                self.at -= 1
                self._refuse("holds a quoted text that does not end on it")
            else:
                self._scalar(start, value, keys)

    def _skip(self, indent: int) -> None:
        while self.at < len(self.lines):
            line = self.lines[self.at][2]
            if line.strip() and len(line) - len(line.lstrip(" ")) <= indent:
                return
            self.at += 1

    def _scalar(self, start: int, value: str, keys: Keys) -> None:
        if value[0] in "\"'":
            start, value = start + 1, value[1:-1]
        if _PLAIN.fullmatch(value):
            self.found[keys] = Number(float(value.replace("_", "")), start, start + len(value))

    def _flow(self, at: int, stop: int, keys: Keys) -> int:
        """The flow collection that begins at `at`; where it ends, or `stop` + 1 when it does not end before."""
        opener, index = self.text[at], 0
        closer = "]" if opener == "[" else "}"
        at += 1
        while at < stop:
            while at < stop and self.text[at] in " \t,":
                at += 1
            if at >= stop:
                break
            if self.text[at] == closer:
                return at + 1
            inner: Keys = (*keys, index)
            index += 1
            if opener == "{":
                match = _FLOW_KEY.match(self.text, at, stop)
                if match is None:
                    break
                inner, at = (*keys, _unquoted(match["key"].strip())), match.end()
                while at < stop and self.text[at] == " ":
                    at += 1
                if at >= stop:
                    break
            if self.text[at] in "[{":
                at = self._flow(at, stop, inner)
                continue
            match = _FLOW_VALUE.match(self.text, at, stop)
            if match is None or (match.end() == at and opener == "["):
                break
            if match[0].strip():
                self._scalar(at, match[0].rstrip(), inner)
            at = match.end()
            if at < stop and self.text[at] not in f",{closer} ":
                break
        return stop + 1


_FLOW_KEY = re.compile(r"""(?P<key>"[^"\\]*"|'[^']*'|[^\s,\[\]{}"':]+)\s*:(?=[\s"'\[{])""")
_FLOW_VALUE = re.compile(r"""\"[^"\\]*\"|'[^']*'|[^,\[\]{}"'\n]*""")


def _unquoted(key: str) -> str:
    return key[1:-1] if key[:1] in "\"'" else key


def _bare(line: str) -> str:
    """The line without its comment; a `#` counts after white space and outside quotes only."""
    quote = ""
    for at, letter in enumerate(line):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'" and (at == 0 or line[at - 1] in " \t[{,:("):
            quote = letter
        elif letter == "#" and (at == 0 or line[at - 1] in " \t"):
            return line[:at]
    return line


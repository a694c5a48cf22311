"""The LRs that the next launch takes from its config files, and the edits that scale them. Pure.

The newest recorded launch names its config files on its command line; nothing is found by its name. A field is edited where
the writer is known to take its LR from it, where the file holds the value that the checkpoint was made with, and where no
argument of the command sets an LR as well. Otherwise the field and its new value are named for a person. Where a script sets
its LR is not guessed.

    LaunchConfig(files).resolve(wanted)     # the edits of all wanted LRs, or the reason why there are none
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rollback.errors import PlanRefused
from rollback.files.config_text import ConfigFile, NotPlainConfig, Number, config_kind, numbers
from rollback.files.edits import dotted
from rollback.files.json_file import Keys
from rollback.lr.effect import FieldEdit

_SAME = 1e-9
_SETTER = re.compile(r"""\[\s*["']lr["']\s*\]\s*[*/+-]?=(?!=)|\.update\(\s*(?:lr\s*=|\{\s*["']lr["'])""")
_MOST_LINES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """An LR that the next launch takes from outside the checkpoint; `places` are the key paths it may have in a config."""

    places: tuple[Keys, ...]
    before: float
    after: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """The edits that give every wanted LR, or why there are none: what a person has to know, "" where no file is named.

    `given`: after the edits, if any are needed, the files give every wanted LR.
    """

    edits: tuple[FieldEdit, ...] = ()
    given: bool = False
    missing: str = ""


@dataclass(frozen=True)
class LaunchConfig:
    """The text files that the newest launch's command names: configs and scripts."""

    files: tuple[ConfigFile, ...] = ()

    @cached_property
    def read(self) -> tuple[tuple[ConfigFile, Mapping[Keys, Number] | None, str], ...]:
        """Each config with its numbers; None and the reason where it cannot be read exactly."""
        found: list[tuple[ConfigFile, Mapping[Keys, Number] | None, str]] = []
        for file in self.files:
            kind = config_kind(file.path)
            if kind is None:
                continue
            try:
                found.append((file, numbers(file.text, kind), ""))
            except NotPlainConfig as problem:
                found.append((file, None, str(problem)))
        return tuple(found)

    def resolve(self, wanted: Sequence[Wanted]) -> Resolved:
        """The edits of all wanted LRs, each in exactly one file, at the value that the checkpoint is at or at the new one."""
        edits: list[FieldEdit] = []
        missing: list[str] = []
        for one in wanted:
            hits = [
                (file, keys, held[keys])
                for file, held, _ in self.read
                if held
                for place in one.places
                if (keys := _below(place, file.package)) in held
            ]
            if len(hits) == 1 and math.isclose(hits[0][2].value, one.before, rel_tol=_SAME):
                file, keys, number = hits[0]
                edits.append(FieldEdit(file=file.path, keys=keys, before=number.value, after=one.after))
            elif len(hits) == 1 and math.isclose(hits[0][2].value, one.after, rel_tol=_SAME):
                continue  # a person, or an earlier rollback, has written it
            elif len(hits) == 1:
                file, keys, number = hits[0]
                missing.append(
                    f"`{file.path}` line {_line(file.text, number.start)}: `{dotted(keys)}` is {number.value:.10g}, and this "
                    f"checkpoint is at {one.before:.10g}: it must become {one.after:.10g}"
                )
            elif hits:
                where = " and ".join(f"`{file.path}:{dotted(keys)}`" for file, keys, _ in hits)
                missing.append(f"{where} both name it: which one counts is not known")
            elif self.read:
                names = " or ".join(f"`{dotted(keys)}`" for keys in one.places)
                unread = "; ".join(f"`{file.path}`: {why}" for file, held, why in self.read if held is None)
                said = f"no config of the command holds {names}, which must become {one.after:.10g}"
                missing.append(said + (f" ({unread})" if unread else ""))
        given = bool(wanted and self.read and not missing)
        return Resolved(edits=tuple(edits), given=True) if given else Resolved(missing="; ".join(missing))

    def setters(self) -> str:
        """The lines of the command's scripts that set the LR of a parameter group themselves; "" where there is none."""
        lines = []
        for file in self.files:
            if file.path.endswith(".py"):
                for number, line in enumerate(file.text.splitlines(), start=1):
                    if _SETTER.search(line.partition("#")[0]):
                        lines.append(f"`{file.path}` line {number}, `{line.strip()[:80]}`")
        return "; ".join(lines[:_MOST_LINES])

    def fields(self, scale: float, named: Any, given: Set[str] = frozenset()) -> str:
        """The LRs that the configs name, and what they become times `scale`; "" where there is none.

        A field that the command gives by its last name is left out: the command counts.
        """
        found = [
            f"`{file.path}:{dotted(keys)}` {number.value:.10g} → {number.value * scale:.10g}"
            for file, held, _ in self.read
            for keys, number in (held or {}).items()
            if named(_last_name(keys)) and number.value > 0 and _last_name(keys) not in given
        ]
        return ", ".join(found[:_MOST_LINES])


def named_edits(named: Sequence[str], files: Sequence[ConfigFile], scale: float) -> tuple[FieldEdit, ...]:
    """The edits of the fields that a person named, as `FILE:key.path`; raises `PlanRefused` where one is no number."""
    return tuple(_named_edit(text, files, scale) for text in dict.fromkeys(named))


def _named_edit(text: str, files: Sequence[ConfigFile], scale: float) -> FieldEdit:
    path, _, field = text.rpartition(":")
    file = next((file for file in files if file.origin == f"from --lr-in {path}"), None)
    kind = None if file is None else config_kind(file.path)
    if file is None or kind is None:
        raise PlanRefused(
            f"--lr-in {text}: expected FILE:key.path with a YAML, TOML or JSON file, such as train.yaml:optimizer.lr",
            remedy="an LR in code has to be changed by hand; then --accept-unproved",
        )
    try:
        held = numbers(file.text, kind)
    except NotPlainConfig as problem:
        raise PlanRefused(f"--lr-in {text}: `{file.path}` cannot be edited exactly: {problem}",
                          remedy="change the LR in it by hand, then --accept-unproved") from None  # fmt: skip
    hits = [(keys, number) for keys, number in held.items() if dotted(keys) == field]
    if len(hits) != 1:
        known = ", ".join(dotted(keys) for keys in held if re.search("lr|rate", _last_name(keys), re.IGNORECASE))
        raise PlanRefused(f"--lr-in {text}: no such number in `{file.path}`: expected one of {known or 'its numbers'}")
    keys, number = hits[0]
    if not number.value > 0:
        raise PlanRefused(f"--lr-in {text}: it is {number.value:g}: expected a positive number that a factor can change")
    return FieldEdit(file=file.path, keys=keys, before=number.value, after=number.value * scale)


def _below(place: Keys, package: Keys) -> Keys:
    """The key path of a field in a file whose fields stand below `package`; itself where they do not."""
    return place[len(package) :] if place[: len(package)] == package else ("", *place)


def leaves_of(value: object, keys: Keys = ()) -> Iterator[tuple[Keys, float]]:
    """Each positive number of a value that is a number or a list of them."""
    if isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from leaves_of(part, (*keys, index))
    elif isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
        yield keys, float(value)


def _last_name(keys: Keys) -> str:
    return next((key for key in reversed(keys) if isinstance(key, str)), "")


def _line(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1

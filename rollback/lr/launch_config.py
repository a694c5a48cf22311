"""The LRs in the config files that the newest launch's command names, and the edits of those that a person names. Pure.

Which of them a launch uses is not known, and where a script sets its LR is not guessed. A field is shown with its file, and
edited where `--lr-in FILE:key.path` names it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rollback.errors import PlanRefused
from rollback.files.config_text import ConfigFile, NotPlainConfig, Number, config_kind, numbers
from rollback.files.edits import dotted
from rollback.files.json_file import Keys
from rollback.lr.effect import FieldEdit

_SETTER = re.compile(r"""\[\s*["']lr["']\s*\]\s*[*/+-]?=(?!=)|\.update\(\s*(?:lr\s*=|\{\s*["']lr["'])""")
_MOST_LINES = 3


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


def _last_name(keys: Keys) -> str:
    return next((key for key in reversed(keys) if isinstance(key, str)), "")

"""Remnants: what a save that was cut leaves under the name of a checkpoint.

A launch that is ended while it saves leaves half of a file, an empty directory, or a directory without its last files. It is no
checkpoint of a known step, so no list has it; but a script that takes the newest name takes it, and fails on it or begins with
half of the state. `find_remnants` names those that are later than one checkpoint: a rollback to it moves them away with the
later checkpoints, and a restart sets them aside. `remnant_findings` names all of them for `verify --all`.

Alike are names that differ in their numbers alone; ranks and shards do not count. A directory is alike only if nothing was
written into it, or a state file that the checkpoint has too: `20` and `2024` may be anything, `epoch_4` a folder of pictures.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from rollback.checkpoint.formats.torch_checkpoint import TORCH_FILE
from rollback.checkpoint.layout import (
    RANKED,
    Checkpoint,
    DirectoryEntry,
    FileType,
    is_leftover,
    scan_entries,
)
from rollback.checks.files import damage, examine_file
from rollback.checks.verify import STATE_SUFFIXES, passes, verify_checkpoint
from rollback.errors import Finding, RollbackError
from rollback.files.state_file import read_state_file

_OF_STATE = (*STATE_SUFFIXES, ".json", ".yaml", ".metadata")  # pictures and notes are no part of a save
_ONE_LEVEL, _TWO_LEVELS = 1, 2


class _Name(NamedTuple):
    """A name and the numbers in it: `step20-rank1.pt` is `step#-&.pt` and [20]."""

    form: str
    numbers: tuple[int, ...]

    @classmethod
    def of(cls, name: str) -> _Name:
        plain = RANKED.sub("&", name)
        plain = plain if re.search(r"\d", plain) else name  # `ep` may stand for epochs, too
        return cls(re.sub(r"\d+", "#", plain), tuple(int(number) for number in re.findall(r"\d+", plain)))


def find_remnants(root: Path, listed: Iterable[Checkpoint], than: Checkpoint) -> dict[str, int]:
    """Names in `root` that are no checkpoint and are called as `than` and its parts are, with a higher number; and their step.

    `listed` are the checkpoints of `root`. Where the name of `than` has its step, the number is a step, and everything later
    is named. Where it counts something else (saves, epochs), the step is the next one after `than`, and only what is cut is
    named: the other numbers may be ranks. Reads files of which this has to be known. Raises `RollbackError` where `root`
    cannot be listed.
    """
    present = [one for one in listed if one.abandoned is None]
    known = {name for one in present if one.step is not None for name in one.names}
    unknown = {one.path.name: one for one in present if one.step is None}
    own = {name.form: name.numbers for name in map(_Name.of, than.names)}
    begun = than.step or 0
    found = {}
    for entry in scan_entries(root, levels=_ONE_LEVEL):
        name = _Name.of(entry.name)
        mine = own.get(name.form)
        if mine is None or entry.name in known or entry.kind not in (FileType.FILE, FileType.DIRECTORY):
            continue
        counted = [its for its, number in zip(name.numbers, mine, strict=True) if number == than.step]
        higher = name.numbers != mine and all(its >= number for its, number in zip(name.numbers, mine, strict=True))
        step = max(counted) if counted else begun + higher
        if step > begun and _is_of_the_series(root, entry, than):
            one = unknown.get(entry.name)
            if counted or (_what_is_cut(root, entry) is not None if one is None else not passes(verify_checkpoint(one))):
                found[entry.name] = step
    return found


def remnant_findings(root: Path, listed: Sequence[Checkpoint]) -> list[Finding]:
    """F2 and F3 for the remnants in `root`."""
    present = [one for one in listed if one.abandoned is None]
    known = {name for one in present for name in one.names}
    forms = {_Name.of(name).form: one for one in present for name in one.names}
    found = []
    for entry in scan_entries(root, levels=_ONE_LEVEL) if root.is_dir() else ():
        one = forms.get(_Name.of(entry.name).form)
        if one is None or entry.name in known or not re.search(r"\d", entry.name) or not _is_of_the_series(root, entry, one):
            continue
        if (reason := _what_is_cut(root, entry)) is not None:
            check, words = reason
            words = f"{words}; a save that was cut leaves this, and a loader that takes the newest name takes it"
            finding = damage(entry.name, words, "move it elsewhere; a rollback to an earlier step moves it, too")
            found.append(finding._replace(check=check))
    return found


def _is_of_the_series(root: Path, entry: DirectoryEntry, one: Checkpoint) -> bool:
    """Whether an entry that is named as a checkpoint may be of the same writer."""
    if one.single_file:
        return entry.kind is FileType.FILE
    if entry.kind is not FileType.DIRECTORY:
        return False
    held = [inner for inner in _files_of(root / entry.name) if not _is_unfinished(inner.name)]
    own = {file.path for file in one.files}
    return not held or any(inner.path in own and inner.name.endswith(_OF_STATE) for inner in held)


def _is_unfinished(name: str) -> bool:
    """Whether a writer gives this name to what it has not written to its end."""
    return is_leftover(name) or (name.startswith(".") and not name.endswith(_OF_STATE))


def _what_is_cut(root: Path, entry: DirectoryEntry) -> tuple[str, str] | None:
    """(check, what is wrong) with an entry that no format takes for a checkpoint; None for a file that can be read."""
    if entry.kind is FileType.FILE:
        words = _damage_of(root / entry.name)
        return None if words is None else ("F3", words)
    files = _files_of(root / entry.name)
    if not files:
        return "F2", "the directory is empty"
    for inner in files:
        if (words := _damage_of(root / entry.name / inner.path)) is not None:
            return "F3", f"`{inner.path}`: {words}"
    return "F2", f"no training state is in it ({', '.join(inner.path for inner in files[:3])})"


def _damage_of(path: Path) -> str | None:
    """Why a file cannot be read; None where it can."""
    if TORCH_FILE.fullmatch(path.name):
        try:
            read_state_file(path)
        except RollbackError as problem:
            return problem.message.replace(f"`{path}`: ", "")
        return None
    problems, _ = examine_file(path, path.name, full=False)
    return problems[0].message if problems else None


def _files_of(path: Path) -> list[DirectoryEntry]:
    return [entry for entry in scan_entries(path, levels=_TWO_LEVELS) if entry.kind is not FileType.DIRECTORY]

"""Which checkpoints a launch left anywhere below a directory, also those of no known layout, by their step.

`list_checkpoints` answers for one directory. A launch in a directory of its own may save some levels below it. All of it is its
own: where no layout is known a name tells enough.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from rollback.checkpoint.layout import Checkpoint
from rollback.checkpoint.listing import list_checkpoints
from rollback.errors import RollbackError
from rollback.files.json_file import Keys
from rollback.files.state_file import read_state_file
from rollback.files.torch_tree import walk_leaves

MOST_LEVELS = 3  # as Lightning's `lightning_logs/version_0/checkpoints`


def saved_in(out: Path) -> dict[int, Checkpoint]:
    """The checkpoints in a directory, and in those below it, by their step."""
    return {one.step: one for one in checkpoints_below(out) if one.step is not None}


def checkpoints_below(out: Path) -> list[Checkpoint]:
    """Every checkpoint in a directory, and in those below it.

    Where no layout is known, what has exactly one number in its name, and a number that nothing else there has, is the save of
    that step: `rl_model_400_steps.zip`. An empty directory is none: its save has only begun.
    """
    found: list[Checkpoint] = []
    named: dict[int | None, list[Path]] = defaultdict(list)
    for place, names, files in os.walk(out):
        folder = Path(place)
        listed = {one.path: one for one in listed_in(folder)}
        saves = [_counted(one) for one in listed.values()]
        numbers = [int(text) for text in re.findall(r"\d+", folder.name)]
        if len(saves) > 1 and all(one.step in numbers for one in saves):  # parts, in a directory of their step
            saves = [replace(saves[0], path=folder, single_file=False)]
        found += saves
        others = [name for name in (*names, *files) if folder / name not in listed]
        is_deep = len(folder.relative_to(out).parts) >= MOST_LEVELS or folder in listed
        names[:] = [] if is_deep else [name for name in names if name in others and not name.startswith(".")]
        for name in others:
            named[_number_in(name)].append(folder / name)
    if any(one.step is not None for one in found):
        return found
    alone = []
    for step, (path, *more) in named.items():
        if step is not None and not more and _holds_files(path):
            alone.append(
                Checkpoint(path=path, step=step, step_source="name", format="unknown", files=(), single_file=path.is_file())
            )
    return alone


def _holds_files(path: Path) -> bool:
    return path.is_file() or any(one.is_file() for one in path.rglob("*"))


def _counted(one: Checkpoint) -> Checkpoint:
    """With the step in its name, where that is later than what it counts and, in a file, counted there too; or with its epochs.

    What counts may be lost, or go slower: an optimizer counts its own steps, which begin anew, or come once in four batches.
    """
    named = _number_in(one.path.name)
    counts: dict[Keys, object] = {(): named}
    if one.single_file:
        try:
            counts = {leaf.keys: leaf.value for leaf in walk_leaves(read_state_file(one.path).tree)}
        except RollbackError:
            return one
    if named is not None and named > (one.step or 0) and named in counts.values():
        return replace(one, step=named, step_source="name")
    epoch = counts.get(("epoch",))
    return replace(one, step=epoch, step_source="epoch") if one.step is None and isinstance(epoch, int) else one


def _number_in(name: str) -> int | None:
    numbers = re.findall(r"\d+", name)
    return int(numbers[0]) if len(numbers) == 1 else None


def listed_in(folder: Path) -> list[Checkpoint]:
    """The checkpoints directly in a directory; none where it cannot be read."""
    try:
        return list_checkpoints(folder, include_abandoned=False)
    except RollbackError:
        return []

"""The one checkpoint of a step. Nothing is guessed: none, or several, is an error that names the nearest or all."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from rollback.checkpoint.layout import Checkpoint
from rollback.checkpoint.listing import directories_with_checkpoints, without_links
from rollback.errors import AmbiguousStep, CheckpointNotFound


def select_checkpoint(
    checkpoints: Iterable[Checkpoint], step: int, launch: int | None = None, root: Path | None = None
) -> Checkpoint:
    """The one checkpoint of exactly `step` (and `launch`), of those in `root`.

    A step alone means the checkpoint that lies in the directory: what a rollback abandoned is one of its `twins`. A link is
    what it points to.

    Raises `CheckpointNotFound` naming the two nearest, or directories near `root` that hold some; `AmbiguousStep` listing all
    when there are several.
    """
    candidates = list(checkpoints)
    found = without_links([c for c in candidates if c.step == step and (launch is None or c.launch == launch)])
    present = [c for c in found if c.abandoned is None]
    if launch is None and len(present) == 1:
        twins = tuple(_one_line(c) for c in found if c.abandoned is not None)
        return replace(present[0], twins=twins)
    if len(found) > 1:
        lines = "".join(f"\n  {_one_line(checkpoint)}" for checkpoint in found)
        raise AmbiguousStep(f"step {step} exists {len(found)} times, one was expected:{lines}", _way_to_pick(found))
    if found:
        return found[0]
    of_launch = f" of launch {launch}" if launch is not None else ""
    others = [c for c in candidates if c.step == step]
    if others:
        known = sorted({c.launch for c in others if c.launch is not None})
        where = f"in launch {', '.join(map(str, known))}" if known else "without a recorded launch"
        way = f"{step}@{known[-1]}" if known else str(others[0].path)
        raise CheckpointNotFound(
            f"no checkpoint of step {step}{of_launch}: step {step} exists {where}", remedy=f"name it: {way}"
        )
    raise CheckpointNotFound(
        f"no checkpoint of step {step}{of_launch}: {_nearest(candidates, step)}", remedy=_way_to_near(candidates, step, root)
    )


def refuse_link(chosen: Checkpoint) -> None:
    """Raise `CheckpointNotFound` for a checkpoint that is here only as a symbolic link."""
    if chosen.path.is_symlink():
        raise CheckpointNotFound(
            f"step {chosen.step} exists only as `{chosen.path}`, a symbolic link to `{os.readlink(chosen.path)}`: expected the "
            "checkpoint itself in this directory, because a rollback moves it",
            "move the checkpoint to the place of the link, or name its own directory with --checkpoints",
        )


def _one_line(checkpoint: Checkpoint) -> str:
    launch = f"launch {checkpoint.launch}" if checkpoint.launch is not None else "launch not recorded"
    abandoned = f", abandoned by {checkpoint.abandoned}" if checkpoint.abandoned else ""
    return f"`{checkpoint.path}` ({launch}{abandoned})"


def _way_to_pick(found: Sequence[Checkpoint]) -> str:
    """A hint: the launch if only one of them has it, else the path."""
    launches = [c.launch for c in found]
    for checkpoint in found:
        if checkpoint.launch is not None and launches.count(checkpoint.launch) == 1:
            return f"pick one by its launch, e.g. `{checkpoint.step}@{checkpoint.launch}`, or by its path"
    return f"pick one by its path, e.g. `{found[0].path}`"


def _nearest(checkpoints: Sequence[Checkpoint], step: int) -> str:
    steps = sorted({c.step for c in checkpoints if c.step is not None})
    below = max((s for s in steps if s < step), default=None)
    above = min((s for s in steps if s > step), default=None)
    near = [str(s) for s in (below, above) if s is not None]
    if near:
        return "the nearest are " + " and ".join(near) if len(near) > 1 else f"the nearest is {near[0]}"
    unread = [c for c in checkpoints if c.step is None]
    if not unread:
        return "there is none at all"
    names = ", ".join(c.path.name for c in unread[:5])
    stray = next((f" (a stray lies in it: `{c.path.name}/{c.strays[0]}`)" for c in unread if c.strays), "")
    return f"only {names}, whose step is not known{stray}"


def _way_to_near(checkpoints: Sequence[Checkpoint], step: int, root: Path | None) -> str:
    """A hint: the nearest checkpoint at or below the step, else where else to look."""
    if not checkpoints and root is not None and (near := directories_with_checkpoints(root)):
        return f"{near[0][1]} checkpoints are in `{near[0][0]}`: --checkpoints {near[0][0]}"
    steps = sorted({c.step for c in checkpoints if c.step is not None}, key=lambda s: (s > step, abs(s - step)))
    if not steps and any(c.strays for c in checkpoints):
        return "move it out of the checkpoint, or let `chronicle verify --quarantine` do it"
    return f"name one of these, such as {steps[0]}" if steps else "name the directory that holds them with --checkpoints"

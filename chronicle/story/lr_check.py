"""Whether the LR that was logged follows the LR ledger: the new launch against the old one at the same step.

Two launches that both logged a step on the same schedule must differ by exactly the ledger's ratio. That needs no
scheduler, no framework and no checkpoint; where no step was logged twice, nothing is claimed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from chronicle.journal import Entry
from chronicle.paths import RunPaths
from chronicle.story.assemble import Story
from chronicle.story.launches import LaunchStory
from chronicle.story.measurements import points_until
from chronicle.story.plain import format_factor

__all__ = ["LrCheck", "check_lr"]

LOOKED_AT = 20  # steps behind the resume
TOLERANCE = 0.01  # logs print LRs with three or four digits


@dataclass(frozen=True, slots=True, kw_only=True)
class LrCheck:
    """`follows` None = no step was logged by both launches, nothing is claimed."""

    follows: bool | None = None
    sentence: str = ""
    step: int | None = None
    found: float | None = None
    expected: float | None = None


def check_lr(story: Story, paths: RunPaths) -> LrCheck:
    """Compare the head's launch with an earlier one that logged the same first step."""
    launch = story.launch(story.headline.launch)
    line = None if launch is None else launch.lr
    if launch is None or line is None or launch.span.start_step is None:
        return LrCheck()
    should = line.factor if line.factor is not None else line.asked
    for earlier in reversed(story.launches[: story.launches.index(launch)]):
        other = earlier.lr
        if other is None or other.factor is None or should is None or not _shares_steps(launch, earlier):
            continue
        first = max(launch.span.start_step, _warm_until(story.entries, launch.span.start_step)) + 1
        check = _compare(launch, earlier, should / other.factor, paths, first)
        if check is not None:
            return check
    return LrCheck()


def _shares_steps(launch: LaunchStory, earlier: LaunchStory) -> bool:
    first = (launch.span.start_step or 0) + 1
    return (earlier.span.start_step or 0) < first + LOOKED_AT and (earlier.span.last_step or 0) >= first


def _warm_until(entries: Sequence[Entry], start: int) -> int:
    """The last step of a warm-up that a rollback asked for and that a launch starting here is in; 0 without one."""
    asked = [(e.step, e.data.get("warmup_steps")) for e in entries if e.kind == "rollback.receipt" and e.step is not None]
    ends = [step + count for step, count in asked if isinstance(count, int) and step <= start < step + count]
    return max(ends, default=0)


def _compare(
    launch: LaunchStory, earlier: LaunchStory, ratio: float, paths: RunPaths, first: int
) -> LrCheck | None:
    last = min(launch.span.last_step or 0, earlier.span.last_step or 0)
    step = min(last, first + LOOKED_AT)
    mine, theirs = _lrs(paths, launch.number, first, step), _lrs(paths, earlier.number, first, step)
    shared = sorted(set(mine) & set(theirs))
    if not shared or not theirs[shared[-1]]:
        return None
    at = shared[-1]
    found = mine[at] / theirs[at]
    if abs(found - ratio) <= TOLERANCE * abs(ratio):
        return LrCheck(follows=True, sentence="the logged LR follows", step=at, found=found, expected=ratio)
    words = (
        f"the logged LR does NOT follow: launch {launch.number} runs at {format_factor(_round(found))} of launch "
        f"{earlier.number} at step {at}, expected {format_factor(ratio)}"
    )
    return LrCheck(follows=False, sentence=words, step=at, found=found, expected=ratio)


def _lrs(paths: RunPaths, launch: int, first: int, last: int) -> dict[int, float]:
    points = points_until(paths.metrics_path(launch), last)
    return {p.step: p.values["lr"] for p in points if p.step >= first and "lr" in p.values}


def _round(value: float) -> float:
    return float(f"{value:.4g}")

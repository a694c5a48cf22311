"""The state of a run as plain JSON (`status --json`, the live page), and the check of the logged LR against the LR ledger.

`check_lr` compares two launches that logged the same step: on one schedule their LRs must differ by the ledger's ratio. If no
step was logged twice, it makes no statement.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from chronicle.checkpoints import CheckpointVerdict
from chronicle.journal import Entry, Interval
from chronicle.journal.events import RollbackReceipt, events_of
from chronicle.paths import RunPaths
from chronicle.story.assemble import LaunchStory, Story
from chronicle.story.matters import Matter
from chronicle.story.plain import format_factor
from chronicle.story.read import points_until
from rollback.channels import Role, value_of

LOOKED_AT = 20  # steps after the resume
TOLERANCE = 0.01  # logs print LRs with three or four digits


class LrCheck(NamedTuple):
    """Whether the logged LR agrees the ledger. `follows` None: no step was logged by both launches."""

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
    """The last step of a rollback's warm-up that a launch starting at `start` is in; 0 without one."""
    asked = [(entry.step, receipt.warmup_steps or 0) for entry, receipt in events_of(entries, RollbackReceipt)]
    return max((step + count for step, count in asked if step is not None and step <= start < step + count), default=0)


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
        return LrCheck(follows=True, sentence="the logged LR agrees", step=at, found=found, expected=ratio)
    words = (
        f"the logged LR does NOT agree: launch {launch.number} runs at {format_factor(_round(found))} of launch "
        f"{earlier.number} at step {at}, expected {format_factor(ratio)}"
    )
    return LrCheck(follows=False, sentence=words, step=at, found=found, expected=ratio)


def _lrs(paths: RunPaths, launch: int, first: int, last: int) -> dict[int, float]:
    points = points_until(paths.metrics_path(launch), last)
    return {p.step: lr for p in points if p.step >= first and (lr := value_of(p.values, Role.LR)) is not None}


def _round(value: float) -> float:
    return float(f"{value:.4g}")


# --- the state as JSON --------------------------------------------------------------------------------------------------


VERSION = 1


def summarize(story: Story, lr: LrCheck, verdict: CheckpointVerdict | None = None) -> dict[str, Any]:
    """The state of the run and what is open. `v` is the version of this form, `verdict` that of the last checkpoint."""
    head, last = story.headline, story.last_launch
    return {
        "v": VERSION,
        "run": story.run,
        "step": head.step,
        "launch": head.launch,
        "values": dict(head.values),
        "loss": head.loss,
        "measured_step": head.measured_step,
        "lr": _lr(story, lr),
        "last_launch": None if last is None else {"launch": last.number, "outcome": last.outcome, "alive": last.alive},
        "lineage": [_interval(story, interval) for interval in story.lineage.kept],
        "inferred": story.lineage.inferred,
        "parent": None if story.parent is None else story.parent.to_json(),
        "checkpoint": _checkpoint(story, verdict),
        "unverified_launches": [launch.number for launch in story.unverified],
        "open_incidents": [_matter(matter) for matter in story.open_matters],
        "open_outcomes": [x.entry.id for x in story.interventions if x.open],
        "open_intent": None if story.intent is None else story.intent.id,
        "proposal": _proposal(story),
        "journal_problems": len(story.problems),
    }


def _interval(story: Story, interval: Interval) -> dict[str, Any]:
    launch = story.launch(interval.launch)
    inferred = launch is None or launch.span.inferred
    return {"launch": interval.launch, "first": interval.first, "last": interval.last, "inferred": inferred}


def _lr(story: Story, lr: LrCheck) -> dict[str, Any]:
    line = story.ledger.line(story.headline.launch)
    return {
        "value": story.headline.lr,
        "factor": None if line is None else line.factor,
        "pending_factor": story.ledger.pending,
        "ledger": [
            {"launch": x.launch, "factor": x.factor, "asked": x.asked, "reason": x.reason} for x in story.ledger.lines
        ],
        "follows": lr.follows,
        "said": lr.sentence,
    }


def _checkpoint(story: Story, verdict: CheckpointVerdict | None) -> dict[str, Any] | None:
    saved = story.last_checkpoint
    if saved is None:
        return None
    found = None if verdict is None else {"full": verdict.full, "passes": verdict.passes, "ts": verdict.ts}
    return {**saved.data, "step": saved.step, "launch": saved.launch, "path": saved.path, "verified": found}


def _matter(matter: Matter) -> dict[str, Any]:
    entry = matter.entry
    return {"id": matter.first_id, "title": entry.title, "launch": entry.launch, "step": entry.step, "status": matter.status}


def _proposal(story: Story) -> dict[str, Any] | None:
    found = story.proposal
    if found is None:
        return None
    return {
        "id": found.entry.id,
        "target_step": found.target_step,
        "lr_scale": found.lr_scale,
        "command": found.command,
    }

"""The story's state as plain JSON: what `status --json`, the live page and other programs read. Pure."""

from typing import Any

from chronicle.story.assemble import Story
from chronicle.story.lr_check import LrCheck
from chronicle.story.matters import Matter
from chronicle.verified import Verdict

__all__ = ["summarize"]

VERSION = 1


def summarize(story: Story, lr: LrCheck, verdict: Verdict | None = None) -> dict[str, Any]:
    """Where the run is and what is open; `v` is the version of this form. `verdict` is that on the last checkpoint."""
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
        "lineage": [{"launch": i.launch, "first": i.first, "last": i.last} for i in story.lineage.kept],
        "checkpoint": _checkpoint(story, verdict),
        "unverified_launches": [launch.number for launch in story.unverified],
        "open_incidents": [_matter(matter) for matter in story.open_matters],
        "open_outcomes": [x.entry.id for x in story.interventions if x.open],
        "open_intent": None if story.intent is None else story.intent.id,
        "proposal": _proposal(story),
        "journal_problems": len(story.problems),
    }


def _lr(story: Story, lr: LrCheck) -> dict[str, Any]:
    line = story.ledger.line(story.headline.launch)
    return {
        "value": story.headline.values.get("lr"),
        "factor": None if line is None else line.factor,
        "pending_factor": story.ledger.pending,
        "ledger": [
            {"launch": x.launch, "factor": x.factor, "asked": x.asked, "reason": x.reason} for x in story.ledger.lines
        ],
        "follows": lr.follows,
        "said": lr.sentence,
    }


def _checkpoint(story: Story, verdict: Verdict | None) -> dict[str, Any] | None:
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

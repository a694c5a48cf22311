"""What MLflow is told of a run and of a launch beside its metrics: parameters, tags, the note. Pure."""

import re

from chronicle.report.markdown import render_markdown
from chronicle.story import LaunchStory, Story
from chronicle.story.plain import plain

__all__ = ["launch_params", "launch_tags", "metric_key", "run_tags"]

VALUE_CHARACTERS = 500  # parameters and tags: the smallest limit of the servers in use
NOTE_CHARACTERS = 5000


def launch_params(launch: LaunchStory) -> dict[str, str]:
    """Facts of its start; an MLflow parameter never changes."""
    params = {"launch": str(launch.number), "argv": " ".join(launch.argv), "host": launch.host, "git_commit": launch.git_commit}
    if launch.lr is not None:
        params["lr_factor"] = "unknown" if launch.lr.factor is None else f"{launch.lr.factor:g}"
    return {key: plain(value)[:VALUE_CHARACTERS] for key, value in params.items() if value}


def launch_tags(launch: LaunchStory) -> dict[str, str]:
    """Where it began and where it was given up; an empty `abandoned_after` takes a tag back."""
    span = launch.span
    tags = {
        "chronicle.start_step": span.start_step,
        "chronicle.resumed_from": span.start_step if launch.resumed else None,
        "chronicle.parent_launch": span.parent,
        "chronicle.lr_factor": None if launch.lr is None or launch.lr.factor is None else f"{launch.lr.factor:g}",
        "chronicle.guard": launch.verdict,
        "abandoned_after": span.abandoned_after if span.abandoned_after is not None else "" if span.has_steps else None,
    }
    return {key: plain(value) for key, value in tags.items() if value is not None and (value != "" or key == "abandoned_after")}


def run_tags(story: Story) -> dict[str, str]:
    """What the lineage says: MLflow has no curve on the parent, so no abandoned point can become a headline."""
    head = story.headline
    tags = {"lineage.step": str(head.step), "lineage.launch": str(head.launch or "")}
    tags |= {f"lineage.{metric_key(name)}": f"{value:.6g}" for name, value in head.values.items()}
    tags["lineage.lr_ledger"] = " -> ".join("?" if f is None else f"{f:g}" for f in story.lr_path)
    note = render_markdown(story, picture=False)
    tags["mlflow.note.content"] = note if len(note) <= NOTE_CHARACTERS else note[:NOTE_CHARACTERS] + "\n\n… (cut)"
    return {key: value for key, value in tags.items() if value}


def metric_key(name: str) -> str:
    """MLflow's alphabet for names."""
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)[:250]

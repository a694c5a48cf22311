"""One launch of a study's trainer: its command line, and the result it leaves.

    settings ── words ── chronicle run -- COMMAND ── checkpoint after {last}, metrics ── LegResult
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

from chronicle.errors import UsageProblem
from chronicle.metrics.log import MetricsWriter, Point, read_metrics
from chronicle.metrics.numbers import number_in
from chronicle.metrics.readers import read_log
from chronicle.rehearse.leaves import LeafForm, read_leaves
from experiments.definition import Setting
from experiments.design import START, Leg, StudyPlan, StudyRun
from experiments.errors import StudyError
from experiments.files import LegResult, StudyPaths

RANDOM = re.compile("rng|random")
OUTPUT, GUARD = "output", "guard"  # where metrics come from; anything else is the path of a log

# --- The command line


def settings_of_leg(plan: StudyPlan, run: StudyRun, leg: Leg) -> dict[str, Setting]:
    """The settings of a launch: the usual ones, the arm's, and from its first restart on the restart's."""
    own = plan.study.arm(run.arm).set if run.arm != START else {}
    return {**usual_settings(plan), **own, **(leg.restart.set if leg.restart is not None else {})}


def usual_settings(plan: StudyPlan) -> dict[str, Setting]:
    """The settings of a launch that nothing was done to, in this profile."""
    return {**plan.study.trainer.settings, **plan.profile.set}


def is_treated(plan: StudyPlan, run: StudyRun, leg: Leg) -> bool:
    """Whether this launch differs on purpose from the one that saved its checkpoint: the guard then only warns."""
    first = plan.profile.start_updates + leg.first
    reads_on = plan.positions(run, leg) == [range(first, first + leg.num_updates)]
    reshuffled = leg.restart is not None and leg.restart.reshuffle
    return reshuffled or not reads_on or settings_of_leg(plan, run, leg) != usual_settings(plan)


def placeholders(plan: StudyPlan, run: StudyRun, leg: Leg, paths: StudyPaths, python: str) -> dict[str, Setting]:
    """The value of every placeholder for one launch; steps count from the beginning of the common start."""
    begin, size = plan.profile.start_updates, plan.profile.slice_updates
    reshuffled = [one for one in run.legs[: leg.number] if one.restart is not None and one.restart.reshuffle]
    resume = resume_path(plan, run, leg, paths)
    return {
        **settings_of_leg(plan, run, leg), "seed": plan.order_seed(run), "begin": begin, "first": begin + leg.first,
        "last": begin + leg.last, "updates": leg.num_updates, "total": begin + size * len(plan.study.arms[0].slices),
        "data": ",".join(f"{part.start}:{part.stop}" for part in plan.positions(run, leg)), "order": len(reshuffled),
        "python": python, "resume": str(resume.resolve()) if resume is not None else "",
        "checkpoints": str(paths.checkpoints_dir(run.name).resolve())}


def command_words(plan: StudyPlan, run: StudyRun, leg: Leg, paths: StudyPaths, python: str) -> list[str]:
    """The command of one launch with its placeholders filled in; those of `resume` only where it resumes."""
    trainer, values = plan.study.trainer, placeholders(plan, run, leg, paths, python)
    return [word.format_map(values) for word in (*trainer.command, *(trainer.resume if values["resume"] else ()))]


def checkpoint_after(plan: StudyPlan, owner: StudyRun, update: int, paths: StudyPaths) -> Path:
    """Where the trainer of `owner` saves after an update of the arms (0: the end of the common start)."""
    name = plan.study.trainer.checkpoint.format(step=plan.profile.start_updates + update)
    return paths.checkpoints_dir(owner.name) / name


def resume_path(plan: StudyPlan, run: StudyRun, leg: Leg, paths: StudyPaths) -> Path | None:
    """Return the checkpoint that a leg loads: the common one for a first leg, else the run's own."""
    if run.arm == START:
        return None
    return checkpoint_after(plan, plan.start_of(run) if leg.number == 1 else run, leg.first, paths)


# --- What a launch left


def read_leg(plan: StudyPlan, run: StudyRun, leg: Leg, paths: StudyPaths, launch: int) -> LegResult:
    """The result of a launch that ended well, from its metrics and its last checkpoint; its curves are kept beside the launch.

    Raises `StudyError` where the checkpoint, the loss or (after the last leg) the outcome is not there.
    """
    trainer, begin = plan.study.trainer, plan.profile.start_updates
    checkpoint = checkpoint_after(plan, run, leg.last, paths)
    if not checkpoint.exists():
        raise StudyError(
            f"`{run.name}` left no checkpoint `{checkpoint.name}` after step {begin + leg.last}",
            "key `checkpoint` of the trainer is its name, `{step}` in it; it is looked for below {checkpoints}")
    rows: dict[int, dict[str, float]] = {}
    for point in _points(plan, run, leg, paths, launch):
        if begin + leg.first < point.step <= begin + leg.last:
            rows.setdefault(point.step, {}).update(point.values)
    last: dict[str, float] = {}
    for _, row in sorted(rows.items()):
        last |= {channel: value for channel, value in row.items() if math.isfinite(value)}
    wanted = dict.fromkeys((trainer.outcome, *trainer.also))
    is_last = run.arm != START and leg is run.legs[-1]
    for channel in (trainer.loss, *(wanted if is_last else ())):
        if channel not in last:
            had = ", ".join(f"`{name}`" for name in sorted(last)[:12])
            raise StudyError(
                f"launch {launch} of `{run.name}` has no `{channel}` in steps {begin + leg.first + 1} to {begin + leg.last}; "
                f"there is {had or 'no channel at all'}", "keys `loss`, `outcome` and `metrics` of the trainer")
    final = {channel: last[channel] for channel in wanted if channel in last}
    renamed = {trainer.loss: "loss", trainer.outcome: "eval/mixture"}
    with MetricsWriter(paths.curves_path(run.name, launch), aloud=False) as metrics:
        for step, row in sorted(rows.items()):
            hidden = set(renamed.values()) - renamed.keys()  # the trainer's own channels of these names
            metrics.write(step, {renamed.get(name, name): value for name, value in row.items() if name not in hidden})
    weights, moments = digest_checkpoint(checkpoint, begin + leg.last)
    return LegResult(weights=weights, moments=moments, final=final)


def _points(plan: StudyPlan, run: StudyRun, leg: Leg, paths: StudyPaths, launch: int) -> Iterator[Point]:
    trainer, own = plan.study.trainer, paths.run(run.name)
    told = False
    try:
        if trainer.metrics == GUARD:
            yield from read_metrics(own.metrics_path(launch))
            yield from _digests(own.launch_dir(launch) / "samples.jsonl")
            return
        path = own.supervisor_log(launch)
        if trainer.metrics != OUTPUT:
            path = Path(trainer.metrics.format_map(placeholders(plan, run, leg, paths, "")))
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if trainer.lines else ():
            for channel, pattern in trainer.lines.items():
                if (found := re.search(pattern, line)) is not None and (value := number_in(found[2])) is not None:
                    told = True
                    yield Point(row=0, step=int(found[1]), time=None, values={channel: value})
        yield from read_log(path)
    except (OSError, UsageProblem, ValueError) as problem:
        if not (told and isinstance(problem, UsageProblem)):  # all its lines may be of a form of their own
            raise StudyError(f"launch {launch} of `{run.name}` left no metrics that can be read: {problem}") from problem


def _digests(path: Path) -> Iterator[Point]:
    """The digest of every batch, where a trainer writes them as the bit transformer does."""
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        row = json.loads(line)
        digest = int(row["digest"][:13], 16)  # 52 bits: a float holds it exactly
        yield Point(row=0, step=row["step"], time=None, values={"data_digest": digest})


def digest_checkpoint(checkpoint: Path, step: int) -> tuple[str, str]:
    """Hex sha256 over the tensors of a checkpoint by name: of the optimizer's, and of all others but random generators'.

    What is stored beside them (times, paths) does not count.
    """
    weights, moments = hashlib.sha256(), hashlib.sha256()
    for name, leaf in sorted(read_leaves(checkpoint, step, checkpoint).items()):
        if leaf.form is LeafForm.TENSOR and not RANDOM.search(name):
            digest = moments if "optim" in name else weights
            digest.update(f"{name} {leaf.value}".encode())
    return weights.hexdigest(), moments.hexdigest()

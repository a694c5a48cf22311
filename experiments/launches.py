"""One launch of a study's trainer: its command line, the checkpoint it is handed, the result it leaves.

    settings ── words ── chronicle run -- COMMAND ── checkpoint after {last}, metrics ── LegResult

A treatment is either a setting of the command or a state. A state is lost in a copy of the checkpoint, never in the run's own:
moments become zeros with a count of 0, as they are in a new optimizer; weights are rounded to bfloat16 and stay float32. Files
are read by torch as tensors and plain values only (`weights_only`), so nothing in a checkpoint is executed.
"""

from __future__ import annotations

import hashlib
import math
import re
import shutil
import zipfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from chronicle.errors import UsageProblem
from chronicle.metrics.log import MetricsWriter, Point, read_metrics
from chronicle.metrics.numbers import number_in
from chronicle.metrics.readers import read_log
from experiments.definition import Loss, Order, Setting
from experiments.design import START, Leg, StudyPlan, StudyRun
from experiments.errors import StudyError
from experiments.files import LegResult, StudyPaths

OUTPUT, GUARD = "output", "guard"  # where metrics come from; anything else is the path of a log

# --- The command line


def settings_of_leg(plan: StudyPlan, run: StudyRun, leg: Leg) -> dict[str, Setting]:
    """The settings of a launch: the usual ones, the arm's, and from its first restart on the restart's."""
    own = plan.study.arm(run.arm).set if run.arm != START else {}
    return {**usual_settings(plan), **own, **(leg.restart.set if leg.restart is not None else {})}


def usual_settings(plan: StudyPlan) -> dict[str, Setting]:
    """The settings of a launch that nothing was done to, in this profile."""
    return {**plan.study.program.settings, **plan.profile.set}


def is_treated(plan: StudyPlan, run: StudyRun, leg: Leg) -> bool:
    """Whether this launch differs on purpose from the one that saved its checkpoint: the guard then only warns."""
    lost = leg.restart is not None and bool(leg.restart.loses or leg.restart.order is not Order.PLAN or leg.data_offset)
    return lost or settings_of_leg(plan, run, leg) != usual_settings(plan) or _reads_again(plan, run, leg)


def _reads_again(plan: StudyPlan, run: StudyRun, leg: Leg) -> bool:
    first = plan.profile.start_updates + leg.first
    return plan.positions(run, leg) != [range(first, first + leg.num_updates)]


def placeholders(
    plan: StudyPlan, run: StudyRun, leg: Leg, paths: StudyPaths, resume: Path | None, python: str
) -> dict[str, Setting]:
    """The value of every placeholder for one launch; steps count from the beginning of the common start."""
    begin, size = plan.profile.start_updates, plan.profile.slice_updates
    reshuffled = leg.restart is not None and leg.restart.order is not Order.PLAN
    restarts = sum(one.restart is not None for one in run.legs[: leg.number])
    return {
        **settings_of_leg(plan, run, leg), "arm": run.arm, "run": run.name, "leg": leg.number, "seed": plan.order_seed(run),
        "start": plan.start_of(run).seed, "first": begin + leg.first, "last": begin + leg.last, "updates": leg.num_updates,
        "total": begin + size * len(plan.study.arms[0].slices), "every": math.gcd(*(begin + at for at in leg.saves)),
        "data": ",".join(f"{part.start}:{part.stop}" for part in plan.positions(run, leg)),
        "order": restarts if reshuffled else 0, "python": python, "resume": str(resume or ""), "skipped": leg.data_offset,
        "checkpoints": str(paths.checkpoints_dir(run.name).resolve()), "plan": str(paths.plan_path.resolve()),
    }


def command_words(plan: StudyPlan, run: StudyRun, leg: Leg, paths: StudyPaths, resume: Path | None, python: str) -> list[str]:
    """The command of one launch with its placeholders filled in; those of `resume` only where it resumes."""
    trainer, values = plan.study.program, placeholders(plan, run, leg, paths, resume, python)
    return [word.format_map(values) for word in (*trainer.command, *(trainer.resume if resume is not None else ()))]


def checkpoint_after(plan: StudyPlan, owner: StudyRun, update: int, paths: StudyPaths) -> Path:
    """Where the trainer of `owner` saves after an update of the arms (0: the end of the common start)."""
    name = plan.study.program.checkpoint.format(step=plan.profile.start_updates + update)
    return paths.checkpoints_dir(owner.name) / name


def resume_path(plan: StudyPlan, run: StudyRun, leg: Leg, paths: StudyPaths) -> Path | None:
    """Return the checkpoint that a leg loads: the common one for a first leg, else the run's own, or a treated copy of it."""
    if run.arm == START:
        return None
    checkpoint = checkpoint_after(plan, plan.start_of(run) if leg.number == 1 else run, leg.first, paths)
    return treated_copy(paths, run, leg, checkpoint) if lost_in_copy(leg) else checkpoint


# --- State lost on purpose


def lost_in_copy(leg: Leg) -> frozenset[Loss]:
    """What a leg loses in a copy of its checkpoint. The schedule is the trainer's to start again."""
    return frozenset(leg.restart.loses if leg.restart is not None else ()) - {Loss.SCHEDULE}


def treated_copy(paths: StudyPaths, run: StudyRun, leg: Leg, checkpoint: Path) -> Path:
    """Where the edited copy of a checkpoint lies that a leg loads."""
    return paths.study_dir / "treated" / f"{run.name}-leg{leg.number}" / checkpoint.name


def lose_in_copy(checkpoint: Path, copy: Path, loses: Collection[Loss]) -> None:
    """Copy a checkpoint (a directory or a file) and lose state in the copy; `StudyError` where there was none to lose."""
    if not checkpoint.exists():
        raise StudyError(f"checkpoint `{checkpoint}` does not exist: the launch before did not save it")
    shutil.rmtree(copy.parent, ignore_errors=True)
    copy.parent.mkdir(parents=True)
    if checkpoint.is_dir():
        shutil.copytree(checkpoint, copy, symlinks=False)
    else:
        shutil.copy2(checkpoint, copy)
    found = dict.fromkeys(loses, 0)
    for path in sorted(copy.rglob("*")) if copy.is_dir() else [copy]:
        if path.is_file():
            for loss, number in _lose_in_file(path, loses).items():
                found[loss] += number
    for loss, what in ((Loss.MOMENTS, "optimizer state"), (Loss.PRECISION, "float32 weights")):
        if loss in loses and not found[loss]:
            raise StudyError(f"checkpoint `{checkpoint}` has no {what} in safetensors or torch files of tensors and plain "
                             f"values: `{loss}` cannot be lost in it")


def _lose_in_file(path: Path, loses: Collection[Loss]) -> dict[Loss, int]:
    """Edit one file; return how many tensors changed, by loss. Files that hold none are left as they are."""
    import torch

    found = dict.fromkeys(loses, 0)
    if path.suffix == ".safetensors":
        from safetensors import safe_open
        from safetensors.torch import save_file

        with safe_open(path, framework="pt") as file:
            metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        _lose(tensors, found)
        if any(found.values()):
            save_file(tensors, path, metadata=metadata)
    elif zipfile.is_zipfile(path):
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except (UnpicklingError, RuntimeError, EOFError):  # other classes: left as it is; the caller says what was not found
            return found
        _lose(state, found)
        if any(found.values()):
            torch.save(state, path)
    return found


def _lose(value: Any, found: dict[Loss, int]) -> None:
    """Edit the tensors of a tree in place and count them in `found`, which has the losses that are asked for.

    What lies in the state of an optimizer is a moment, every other float32 tensor a weight.
    """
    import torch

    if isinstance(value, Mapping) and "state" in value and "param_groups" in value:
        if Loss.MOMENTS in found:
            found[Loss.MOMENTS] += sum(map(_forget, value["state"].values()))
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            _lose(part, found)
    elif isinstance(value, torch.Tensor) and value.dtype == torch.float32 and Loss.PRECISION in found:
        value.copy_(value.to(torch.bfloat16))
        found[Loss.PRECISION] += 1


def _forget(entry: Any) -> int:
    """Zero the state of one parameter, its count too; return how many moments it had."""
    import torch

    number = 0
    for name, value in list(entry.items()) if isinstance(entry, dict) else ():
        if isinstance(value, torch.Tensor):
            value.zero_()
            number += name != "step"
        elif name == "step":
            entry[name] = 0
    return number


# --- What a launch left


def read_leg(plan: StudyPlan, run: StudyRun, leg: Leg, paths: StudyPaths, launch: int) -> LegResult:
    """The result of a launch that ended well, from its metrics and its last checkpoint; its curves are kept beside the launch.

    Raises `StudyError` where the checkpoint, the loss or (after the last leg) the outcome is not there.
    """
    trainer, begin = plan.study.program, plan.profile.start_updates
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
            had = ", ".join(f"`{name}`" for name in sorted({name for row in rows.values() for name in row})[:12])
            raise StudyError(
                f"launch {launch} of `{run.name}` has no `{channel}` in steps {begin + leg.first + 1} to {begin + leg.last}; "
                f"there is {had or 'no channel at all'}", "keys `loss`, `outcome` and `metrics` of the trainer")
    final = {channel: last[channel] for channel in wanted if channel in last}
    with MetricsWriter(paths.curves_path(run.name, launch), aloud=False) as metrics:
        for step, row in sorted(rows.items()):
            metrics.write(step, {_renamed(plan, name): value for name, value in row.items()})
    weights, moments = digest_checkpoint(checkpoint)
    return LegResult(run=run.name, leg=leg.number, first=leg.first, last=leg.last, weights=weights, moments=moments,
                     final=final)


def _renamed(plan: StudyPlan, name: str) -> str:
    """The study's name of a channel; the bit transformer logs its own curve beside its outcome."""
    trainer = plan.study.trainer
    return name if trainer is None else {trainer.loss: "loss", trainer.outcome: "eval/mixture"}.get(name, name)


def _points(plan: StudyPlan, run: StudyRun, leg: Leg, paths: StudyPaths, launch: int) -> Iterator[Point]:
    trainer, own = plan.study.program, paths.run(run.name)
    told = False
    try:
        if trainer.metrics == GUARD:
            yield from read_metrics(own.metrics_path(launch))
            return
        path = own.supervisor_log(launch)
        if trainer.metrics != OUTPUT:
            path = Path(trainer.metrics.format_map(placeholders(plan, run, leg, paths, None, "")))
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if trainer.lines else ():
            for channel, pattern in trainer.lines.items():
                if (found := re.search(pattern, line)) is not None and (value := number_in(found[2])) is not None:
                    told = True
                    yield Point(row=0, step=int(found[1]), time=None, values={channel: value})
        yield from read_log(path)
    except (OSError, UsageProblem, ValueError) as problem:
        if not (told and isinstance(problem, UsageProblem)):  # all its lines may be of a form of their own
            raise StudyError(f"launch {launch} of `{run.name}` left no metrics that can be read: {problem}") from problem


def digest_checkpoint(checkpoint: Path) -> tuple[str, str]:
    """Hex sha256 over the tensors of a checkpoint: of the optimizer's files, and of all others but random generators.

    The bytes of the tensors, in the order of their files; what is stored beside them (times, paths) does not count. A file that
    holds weights and moments counts as weights.
    """
    weights, moments = hashlib.sha256(), hashlib.sha256()
    for path in sorted(checkpoint.rglob("*")) if checkpoint.is_dir() else [checkpoint]:
        name = path.name.lower()
        if path.is_file() and not any(word in name for word in ("rng", "random", "scheduler", "training_args")):
            digest = moments if "optim" in name else weights
            for part in _tensor_bytes(path):
                digest.update(part)
    return weights.hexdigest(), moments.hexdigest()


def _tensor_bytes(path: Path) -> Iterator[bytes]:
    if path.suffix == ".safetensors":
        yield path.read_bytes()
    elif zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as file:
            for name in sorted(file.namelist()):
                if "/data/" in name:
                    yield name.rpartition("/")[2].encode() + file.read(name)

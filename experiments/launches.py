"""One launch of a study's trainer: its command line, and the result it leaves.

    settings ── words ── chronicle run -- COMMAND ── checkpoint after {last}, metrics ── LegResult
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chronicle.errors import UsageProblem
from chronicle.metrics.log import MetricsWriter, Point, read_metrics
from chronicle.metrics.numbers import number_in
from chronicle.metrics.readers import read_log
from chronicle.rehearse.rehearse import leaves_of
from experiments.definition import Setting
from experiments.design import START, Leg, StudyPlan, StudyRun
from experiments.errors import StudyError
from experiments.files import LegResult, StudyPaths

OUTPUT, GUARD = "output", "guard"  # where metrics come from; anything else is the path of a log

@dataclass(frozen=True, slots=True)
class LegLaunch:
    """One launch: what the plan says of it, and where the study's files are."""

    plan: StudyPlan
    run: StudyRun
    leg: Leg
    paths: StudyPaths

    @property
    def named(self) -> dict[str, Any]:
        """How the study's journal names it."""
        return {"run": self.run.name, "arm": self.run.arm, "seed": self.run.seed, "leg": self.leg.number}

    @property
    def title(self) -> str:
        """`launch 2 of 4`."""
        return f"launch {self.leg.number} of {len(self.run.legs)}"

    @property
    def is_last(self) -> bool:
        """Whether the run ends with it."""
        return self.leg is self.run.legs[-1]

    # --- The command line

    @property
    def settings(self) -> dict[str, Setting]:
        """Its settings: the usual ones, the arm's, and from its first restart on the restart's."""
        plan, restart = self.plan, self.leg.restart
        own = plan.study.arm(self.run.arm).set if self.run.arm != START else {}
        return {**plan.usual_settings, **own, **(restart.set if restart is not None else {})}

    @property
    def is_treated(self) -> bool:
        """Whether it differs on purpose from the launch that saved its checkpoint: the guard then only warns."""
        plan, leg = self.plan, self.leg
        first = plan.profile.start_updates + leg.first
        reads_on = plan.positions(self.run, leg) == [range(first, first + leg.num_updates)]
        reshuffled = leg.restart is not None and leg.restart.reshuffle
        return reshuffled or not reads_on or self.settings != plan.usual_settings

    @property
    def checkpoint(self) -> Path:
        """Where its trainer saves at its end."""
        return self._checkpoint_of(self.run, self.leg.last)

    @property
    def resume_path(self) -> Path | None:
        """The checkpoint that it loads: the common one for a first leg, else the run's own."""
        if self.run.arm == START:
            return None
        return self._checkpoint_of(self.plan.start_of(self.run) if self.leg.number == 1 else self.run, self.leg.first)

    def _checkpoint_of(self, owner: StudyRun, update: int) -> Path:
        """Where the trainer of `owner` saves after an update of the arms (0: the end of the common start)."""
        name = self.plan.study.trainer.checkpoint.format(step=self.plan.profile.start_updates + update)
        return self.paths.checkpoints_dir(owner.name) / name

    def placeholders(self, python: str) -> dict[str, Setting]:
        """The value of every placeholder; steps count from the beginning of the common start."""
        plan, run, leg, resume = self.plan, self.run, self.leg, self.resume_path
        begin, size = plan.profile.start_updates, plan.profile.slice_updates
        reshuffled = [one for one in run.legs[: leg.number] if one.restart is not None and one.restart.reshuffle]
        return {
            **self.settings, "seed": plan.order_seed(run), "begin": begin, "first": begin + leg.first,
            "last": begin + leg.last, "updates": leg.num_updates, "total": begin + size * len(plan.study.arms[0].slices),
            "data": ",".join(f"{part.start}:{part.stop}" for part in plan.positions(run, leg)), "order": len(reshuffled),
            "python": python, "resume": str(resume.resolve()) if resume is not None else "",
            "checkpoints": str(self.paths.checkpoints_dir(run.name).resolve())}

    def words(self, python: str) -> list[str]:
        """Its command with the placeholders filled in; those of `resume` only where it resumes."""
        trainer, values = self.plan.study.trainer, self.placeholders(python)
        return [word.format_map(values) for word in (*trainer.command, *(trainer.resume if values["resume"] else ()))]

    # --- What it left

    def read(self, number: int, guard: str | None) -> LegResult:
        """Its result, if it ended well, from its metrics and its last checkpoint; its curves are kept beside the launch.

        `number` is the launch's in its run, `guard` the guard's word. Raises `StudyError` where the checkpoint, the loss or
        (after the last leg) the outcome is not there.
        """
        trainer, run, leg, begin = self.plan.study.trainer, self.run, self.leg, self.plan.profile.start_updates
        if not self.checkpoint.exists():
            raise StudyError(
                f"`{run.name}` left no checkpoint `{self.checkpoint.name}` after step {begin + leg.last}",
                "key `checkpoint` of the trainer is its name, `{step}` in it; it is looked for below {checkpoints}")
        rows: dict[int, dict[str, float]] = {}
        for point in self._points(number):
            if begin + leg.first < point.step <= begin + leg.last:
                rows.setdefault(point.step, {}).update(point.values)
        last: dict[str, float] = {}
        for _, row in sorted(rows.items()):
            last |= {channel: value for channel, value in row.items() if math.isfinite(value)}
        wanted = dict.fromkeys((trainer.outcome, *trainer.also))
        for channel in (trainer.loss, *(wanted if self.is_last and run.arm != START else ())):
            if channel not in last:
                had = ", ".join(f"`{name}`" for name in sorted(last)[:12])
                raise StudyError(
                    f"launch {number} of `{run.name}` has no `{channel}` in steps {begin + leg.first + 1} to "
                    f"{begin + leg.last}; there is {had or 'no channel at all'}",
                    "keys `loss`, `outcome` and `metrics` of the trainer")
        with MetricsWriter(self.paths.curves_path(run.name, number), aloud=False) as metrics:
            for step, row in sorted(rows.items()):
                metrics.write(step, row)
        weights, moments = digest_checkpoint(self.checkpoint, begin + leg.last)
        final = {channel: last[channel] for channel in wanted if channel in last}
        return LegResult(weights=weights, moments=moments, final=final, launch=number, guard=guard)

    def _points(self, number: int) -> Iterator[Point]:
        trainer, own = self.plan.study.trainer, self.paths.run(self.run.name)
        told = False
        try:
            if trainer.metrics == GUARD:
                yield from read_metrics(own.metrics_path(number))
                yield from _digests(own.launch_dir(number) / "samples.jsonl")
                return
            path = own.supervisor_log(number)
            if trainer.metrics != OUTPUT:
                path = Path(trainer.metrics.format_map(self.placeholders("")))
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if trainer.lines else ():
                for channel, pattern in trainer.lines.items():
                    if (found := re.search(pattern, line)) is not None and (value := number_in(found[2])) is not None:
                        told = True
                        yield Point(row=0, step=int(found[1]), time=None, values={channel: value})
            yield from read_log(path)
        except (OSError, UsageProblem, ValueError) as problem:
            if not (told and isinstance(problem, UsageProblem)):  # all its lines may be of a form of their own
                raise StudyError(
                    f"launch {number} of `{self.run.name}` left no metrics that can be read: {problem}") from problem


def _digests(path: Path) -> Iterator[Point]:
    """The digest of every batch, where a trainer writes them as the bit transformer does."""
    if not path.exists():
        return
    for row in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        values = {"data_digest": int(row["digest"][:13], 16)}  # 52 bits: a float holds it exactly
        yield Point(row=0, step=row["step"], time=None, values=values)


def digest_checkpoint(checkpoint: Path, step: int) -> tuple[str, str]:
    """Hex sha256 over the tensors of a checkpoint by name: of the optimizer's, and of all others but random generators'.

    What is stored beside them (times, paths) does not count.
    """
    weights, moments = hashlib.sha256(), hashlib.sha256()
    for name, leaf in sorted(leaves_of(checkpoint, step, checkpoint).items()):
        if leaf.pieces and not re.search("rng|random", name):
            digest = moments if "optim" in name else weights
            digest.update(f"{name} {leaf.shape}".encode())
            for chunk in leaf.chunks():
                digest.update(chunk)
    return weights.hexdigest(), moments.hexdigest()

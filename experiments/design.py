"""Turns a study and a profile into runs and launches, in updates. Pure: no clock, no disk, no random numbers.

arm B, slices of 100:   leg 1  0 ── 100   leg 2  100 ── 200   leg 3 …      each leg is one launch
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from experiments.definition import Arm, Profile, Restart, Setting, Study, build
from experiments.errors import BadStudy

START = "start"  # name of the run that trains the common checkpoint
UNNAMED = {"command": ["experiments.trainer"], "unit": "bits per byte"}  # what plans of before 2026-11-29 launched


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """One launch of an arm in updates from the common checkpoint; it resumes at `first`, saves after `last` and ends."""

    number: int
    first: int
    last: int
    restart: Restart | None = None

    @property
    def num_updates(self) -> int:
        """Updates this launch makes."""
        return self.last - self.first


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRun:
    """One arm at one seed: a run of its own, with its own journal and checkpoints.

    Seeds count on over the common checkpoints: with `n` of them a checkpoint, seed `k·n + i` is order `i` from checkpoint `k`.
    The seed of a start is the number of its checkpoint.
    """

    arm: str
    seed: int
    legs: tuple[Leg, ...]

    @property
    def name(self) -> str:
        """Name of the run: `B-s3`."""
        if self.arm == START:
            return START + (str(self.seed + 1) if self.seed else "")
        return f"{self.arm}-s{self.seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyPlan:
    """The registered plan: the definition, the profile with its seeds, and every run in starting order."""

    study: Study
    profile: Profile
    runs: tuple[StudyRun, ...]
    record: Mapping[str, Any] = field(default_factory=dict, compare=False)  # as it was registered

    @property
    def plan_hash(self) -> str:
        """Hex sha256 of definition, profile, seeds and arms, which determine the numbers."""
        return _digest(self.to_json())

    @property
    def study_hash(self) -> str:
        """Hex sha256 of the definition with this profile alone."""
        return _digest(self.to_json()["study"])

    def start_of(self, run: StudyRun) -> StudyRun:
        """The run that trains the common checkpoint of a run."""
        return run if run.arm == START else self.runs[run.seed // self.profile.seeds]

    def order_seed(self, run: StudyRun) -> int:
        """The seed of a run's order of data: the same for all common checkpoints; of a start, its number."""
        return run.seed if run.arm == START else run.seed % self.profile.seeds

    @property
    def usual_settings(self) -> dict[str, Setting]:
        """The trainer's settings in a launch that nothing was done to, in this profile."""
        return {**self.study.trainer.settings, **self.profile.set}

    @property
    def unit_kinds(self) -> tuple[str, ...]:
        """What the design draws anew for a pair: the study's declaration, else what the sizes say.

        Seeds of several common checkpoints are crossed with them.
        """
        if self.study.units:
            return self.study.units
        return ("checkpoint", "order") if self.profile.starts > 1 else ("seed",)

    def unit_of(self, seed: int) -> tuple[int, ...]:
        """Return the number of a seed's independent unit, of each kind; seeds with the same turn of slices share a `slice`."""
        start, order = divmod(seed, self.profile.seeds)
        turn = order % len(self.study.arms[0].slices)
        numbers = {"seed": seed, "checkpoint": start, "order": order, "slice": turn}
        return tuple(numbers[kind] for kind in self.unit_kinds)

    def positions(self, run: StudyRun, leg: Leg) -> list[range]:
        """What a leg reads, as positions in the batches of a continuous run; a repeated slice has its first positions."""
        begin, size = self.profile.start_updates, self.profile.slice_updates
        if run.arm == START:
            return [range(begin)]
        slices, parts = self.study.arm(run.arm).slices, list[range]()
        cuts = [leg.first, *range(leg.first // size * size + size, leg.last, size), leg.last]
        for first, last in pairwise(cuts):
            at = begin + (slices[first // size] - 1) * size + first % size
            if parts and parts[-1].stop == at:
                parts[-1] = range(parts[-1].start, at + last - first)
            else:
                parts.append(range(at, at + last - first))
        return parts

    @property
    def num_updates(self) -> int:
        """Updates of all launches together."""
        return sum(leg.num_updates for run in self.runs for leg in run.legs)

    @property
    def num_launches(self) -> int:
        """Launches, when none fails."""
        return sum(len(run.legs) for run in self.runs)

    @property
    def arm_names(self) -> tuple[str, ...]:
        """Arms that are run, in the study's order."""
        present = {run.arm for run in self.runs}
        return tuple(arm.name for arm in self.study.arms if arm.name in present)

    def twin_of(self, arm: str) -> str:
        """The arm that is the same but for its restarts; the reference where there is none."""
        own = self.study.arm(arm)
        for other in map(self.study.arm, self.arm_names):
            if other.restart is None and (other.slices, other.set) == (own.slices, own.set):
                return other.name
        return self.study.reference

    def run(self, name: str) -> StudyRun:
        """The run of that name; raises `BadStudy`."""
        for one in self.runs:
            if one.name == name:
                return one
        raise BadStudy(f"no run `{name}` in this plan", "`chronicle experiment plan` lists them")

    def to_json(self) -> dict[str, Any]:
        """Return plain values from which the plan can be rebuilt; other profiles are left out."""
        runs = [[run.arm, run.seed] for run in self.runs if run.arm != START]
        return dict(self.record) or {"study": self.study.to_json(), "profile": self.profile.name, "runs": runs}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> StudyPlan:
        """Rebuild a registered plan. One without a trainer rotated its slices over the seeds, which are its units."""
        definition = record["study"]
        if not definition.get("trainer"):
            definition = {**definition, "trainer": UNNAMED, "units": ["slice"]}
        study = build(Study, definition, registered=True)
        plan = _assemble(study, study.profile(record["profile"]), [(str(arm), int(seed)) for arm, seed in record["runs"]])
        return replace(plan, record=record)


def _digest(record: Any) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def plan_study(study: Study, profile: str) -> StudyPlan:
    """Return the plan of a study with the sizes of one of its profiles; the gate always runs."""
    sizes = study.profile(profile)
    if study.reference not in (*sizes.arms, *study.gate):
        raise BadStudy(f"reference `{study.reference}` is not among the arms of profile `{profile}`")
    if "seed" in study.units and sizes.starts > 1:
        raise BadStudy(f"`units: [seed]` with {sizes.starts} common checkpoints in profile `{profile}`: seeds share "
                       "what was drawn once, and are no independent units", "declare what is drawn anew: checkpoint and order")
    pairs = [(name, start * sizes.seeds) for name in (*study.gate, *sizes.once) for start in range(sizes.starts)]
    pairs += [(name, seed) for seed in range(sizes.seeds * sizes.starts) for name in sizes.arms]
    return _assemble(replace(study, profiles=(sizes,)), sizes, list(dict.fromkeys(pairs)))


def _assemble(study: Study, profile: Profile, pairs: list[tuple[str, int]]) -> StudyPlan:
    legs = (Leg(number=1, first=-profile.start_updates, last=0),)
    starts = [StudyRun(arm=START, seed=number, legs=legs) for number in range(profile.starts)]
    ordered = sorted(pairs, key=lambda pair: (pair[1], pair[0] not in study.gate))  # the gate first: it can end the study
    runs = [StudyRun(arm=arm, seed=seed, legs=legs_of(study.arm(arm), profile)) for arm, seed in ordered]
    return StudyPlan(study=study, profile=profile, runs=(*starts, *runs))


def legs_of(arm: Arm, profile: Profile) -> tuple[Leg, ...]:
    """The launches of one arm. A restart at 0 is the launch that goes on from the common checkpoint."""
    size, total = profile.slice_updates, profile.slice_updates * len(arm.slices)
    if arm.restart is None:
        return (Leg(number=1, first=0, last=total),)
    points = [round(at * size) for at in arm.restart.at] or list(range(size, total, size))
    if points != sorted(set(points)) or points[-1] >= total:
        raise BadStudy(f"arm `{arm.name}` restarts after updates {points}, expected rising numbers inside 0 … {total - 1}")
    cuts = sorted({0, *points, total})
    return tuple(Leg(number=number, first=first, last=last, restart=arm.restart if first in points else None)
                 for number, (first, last) in enumerate(pairwise(cuts), 1))

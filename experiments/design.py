"""Turns a study and a profile into runs and launches, in updates. Pure: no clock, no disk, no random numbers.

arm B, slices of 100:   leg 1  0 ── 100   leg 2  100 ── 200   leg 3 …      each leg is one launch
arm B-skip:             leg 1  0 ── 250   leg 2  150 ──────── 400          rolled back by 100
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from experiments.definition import Arm, Profile, Restart, Study, build
from experiments.errors import BadStudy

START = "start"  # name of the run that trains the common checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """One launch of an arm in updates from the common checkpoint; it resumes at `first` and ends after `last`.

    `saves` are the updates after which it saves: its end, and points to which a later leg goes back.
    """

    number: int
    first: int
    last: int
    saves: tuple[int, ...]
    restart: Restart | None = None
    data_offset: int = 0  # batches skipped so far in this lineage

    @property
    def num_updates(self) -> int:
        """Updates this launch makes."""
        return self.last - self.first

    def parts(self, size: int) -> Iterator[range]:
        """The batches that it reads, in order, cut where slices of `size` batches end."""
        first, last = self.first + self.data_offset, self.last + self.data_offset
        while first < last:
            end = min(last, (first // size + 1) * size)
            yield range(first, end)
            first = end


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

    @property
    def sources(self) -> Mapping[str, int]:
        """The mixture: the profile's where it has one, else the study's."""
        return self.profile.sources or self.study.sources

    def start_of(self, run: StudyRun) -> StudyRun:
        """The run that trains the common checkpoint of a run."""
        return run if run.arm == START else self.runs[run.seed // self.profile.seeds]

    def order_seed(self, run: StudyRun) -> int:
        """The seed of a run's order of data: the same for all common checkpoints; of a start, its number."""
        return run.seed if run.arm == START else run.seed % self.profile.seeds

    @property
    def unit_kinds(self) -> tuple[str, ...]:
        """What the design draws anew for a pair: the study's declaration, else all that seeds share.

        Of the bit transformer's data, seeds with the same turn of the rotation read slices of the same place; seeds of several
        common checkpoints are crossed with them.
        """
        if self.study.units:
            return self.study.units
        if self.profile.starts > 1:
            return ("checkpoint", "order")
        return ("seed",) if self.study.trainer is not None else ("slice",)

    def unit_of(self, seed: int) -> tuple[int, ...]:
        """Return the number of a seed's independent unit, of each kind."""
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
        for part in leg.parts(size):
            number, within = divmod(part.start, size)
            logical = slices[number] - 1 if number < len(slices) else number
            at = begin + logical * size + within
            if parts and parts[-1].stop == at:
                at = parts.pop().start
            parts.append(range(at, begin + logical * size + within + len(part)))
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
        """Rebuild a registered plan."""
        study = build(Study, record["study"], registered=True)
        plan = _assemble(study, study.profile(record["profile"]), [(str(arm), int(seed)) for arm, seed in record["runs"]])
        return replace(plan, record=record)


def _digest(record: Any) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def plan_study(study: Study, profile: str, *, seeds: int | None = None, arms: tuple[str, ...] = ()) -> StudyPlan:
    """Return the plan of a study. `arms` replaces the arms of the profile; the reference and its gate always run."""
    sizes = study.profile(profile)
    if seeds is not None:
        if seeds < 1:
            raise BadStudy(f"seeds is {seeds}, expected 1 or more")
        sizes = replace(sizes, seeds=seeds)
    study = replace(study, profiles=(sizes,))
    every, once = sizes.arms, sizes.once
    if arms:
        for name in arms:
            study.arm(name)
        every = tuple(name for name in (study.reference, *arms) if name not in study.gate[1:])
        every, once = tuple(dict.fromkeys(every)), study.gate[1:]
    if study.reference not in (*every, *study.gate):
        raise BadStudy(f"reference `{study.reference}` is not among the arms of profile `{profile}`")
    pairs = [(name, start * sizes.seeds) for name in (*study.gate, *once) for start in range(sizes.starts)]
    pairs += [(name, seed) for seed in range(sizes.seeds * sizes.starts) for name in every]
    return _assemble(study, sizes, list(dict.fromkeys(pairs)))


def _assemble(study: Study, profile: Profile, pairs: list[tuple[str, int]]) -> StudyPlan:
    _check_sizes(study, profile)
    legs = (Leg(number=1, first=-profile.start_updates, last=0, saves=(0,)),)
    starts = [StudyRun(arm=START, seed=number, legs=legs) for number in range(profile.starts)]
    # The gate first, because it can end the study. Then the arms of the main questions by seed; the others last.
    ordered = sorted(pairs, key=lambda pair: (pair[0] not in study.central_arms, pair[1], pair[0] not in study.gate))
    runs = [StudyRun(arm=arm, seed=seed, legs=legs_of(study.arm(arm), profile)) for arm, seed in ordered]
    return StudyPlan(study=study, profile=profile, runs=(*starts, *runs))


def legs_of(arm: Arm, profile: Profile) -> tuple[Leg, ...]:
    """The launches of one arm. A restart at 0 is the launch that goes on from the common checkpoint."""
    size, total = profile.slice_updates, profile.slice_updates * len(arm.slices)
    if arm.restart is None:
        return (Leg(number=1, first=0, last=total, saves=(total,)),)
    restart = arm.restart
    points = [round(at * size) for at in restart.at] or list(range(size, total, size))
    if points != sorted(set(points)) or points[0] < 0 or points[-1] >= total:
        raise BadStudy(
            f"arm `{arm.name}` restarts after updates {points}, expected rising numbers inside 0 … {total - 1}"
        )
    return tuple(_cut_legs(restart, points, total, round(restart.back * size), round(restart.skip * size)))


def _cut_legs(restart: Restart, points: list[int], total: int, back: int, skip: int) -> Iterator[Leg]:
    at_once = points[0] == 0
    resumes = [] if at_once else [0]
    resumes += [point - back for point in points]
    ends = [*points[at_once:], total]
    if min(resumes) < 0:
        raise BadStudy(f"a rollback by {back} updates goes back before the arm's own start")
    for index, (first, last) in enumerate(zip(resumes, ends, strict=True)):
        later = [point for point in resumes[index + 1 : index + 2] if first < point < last]
        yield Leg(
            number=index + 1,
            first=first,
            last=last,
            saves=(*later, last),
            restart=restart if index or at_once else None,
            data_offset=skip * (index + at_once),
        )


def _check_sizes(study: Study, profile: Profile) -> None:
    if "seed" in study.units and (profile.starts > 1 or (study.trainer is None and profile.seeds > len(study.arms[0].slices))):
        raise BadStudy(f"`units: [seed]` with {profile.starts * profile.seeds} seeds in profile `{profile.name}`: seeds share "
                       "what was drawn once, and are no independent units",
                       "declare what is drawn anew: slice, or checkpoint and order")
    if study.trainer is not None:
        return
    for key in ("d_model", "num_heads", "num_layers", "d_ff", "window_bytes", "batch_size"):
        if not getattr(profile, key):
            raise BadStudy(f"profile `{profile.name}`: {key} is missing, which the bit transformer needs")
    if profile.d_model % (2 * profile.num_heads):
        raise BadStudy(f"profile `{profile.name}`: d_model {profile.d_model} does not divide into {profile.num_heads} heads of "
                       "even width")
    sources = profile.sources or study.sources
    total = sum(sources.values())
    for source, weight in sources.items():
        samples = profile.slice_updates * profile.batch_size * weight
        if samples % (total * profile.shard_samples):
            raise BadStudy(
                f"profile `{profile.name}`: a slice holds {samples / total:g} samples of `{source}`, "
                f"expected a whole number of shards of {profile.shard_samples}",
                "choose slice_updates, batch_size or shard_samples so that slices are whole shards",
            )

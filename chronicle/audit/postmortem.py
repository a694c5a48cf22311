"""Launches and contradictions out of observations. Pure; every sentence says what it follows from.

A launch is inferred where a log begins again: another target or model after one was already there, or a step number
that falls back. What is not in the files is unknown: a missing results file proves nothing (seed 000's first error).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise

from chronicle.audit.traces import Kind, Observed

__all__ = ["Contradiction", "InferredLaunch", "find_contradictions", "infer_launches", "list_unknowns"]

CHANNEL = re.compile(r"\b([A-Za-z_]\w*)\s*=\s*(-?\d+(?:\.\d+)?)\b")
BEGINNINGS = (Kind.TARGET, Kind.CONFIG, Kind.HARDWARE)
SAME_START = timedelta(seconds=5)  # the lines a program prints while it starts


@dataclass(frozen=True, slots=True, kw_only=True)
class InferredLaunch:
    """One start of a program as its log shows it."""

    number: int
    source: str
    observations: tuple[Observed, ...]

    def first(self, kind: Kind) -> Observed | None:
        """The first observation of a kind."""
        return next((one for one in self.observations if one.kind is kind), None)

    def number_of(self, kind: Kind, name: str) -> float | None:
        """A number of the first observation of a kind."""
        found = self.first(kind)
        return None if found is None else found.numbers.get(name)

    @property
    def started(self) -> datetime | None:
        """The first time written in it."""
        return next((one.time for one in self.observations if one.time is not None), None)

    @property
    def reached(self) -> str:
        """How far it provably came: planned < created < training loop < stepped."""
        order = ((Kind.STEP, "stepped"), (Kind.LOOP, "entered the training loop"), (Kind.CREATED, "created its model"))
        return next((word for kind, word in order if self.first(kind) is not None), "only planned, as far as is written")

    @property
    def ending(self) -> Observed | None:
        """The line that ends it, if any is written."""
        return next((one for one in reversed(self.observations) if one.kind in (Kind.ENDED, Kind.ERROR, Kind.MEMORY)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contradiction:
    """Two things that cannot both be meant as written, or a reading that the numbers forbid."""

    text: str
    follows_from: tuple[str, ...]


def infer_launches(observations: Iterable[Observed]) -> tuple[InferredLaunch, ...]:
    """Group the lines of each log into launches, in order of time where it is known."""
    by_source: dict[str, list[Observed]] = {}
    for one in observations:
        if one.kind is not Kind.PROCESS:
            by_source.setdefault(one.source, []).append(one)
    groups = [group for source in by_source.values() for group in _split(source)]
    groups.sort(key=lambda group: (next((one.time for one in group if one.time), datetime.max), group[0].source))
    return tuple(
        InferredLaunch(number=number, source=group[0].source, observations=tuple(group))
        for number, group in enumerate(groups, start=1)
    )


def _split(lines: Sequence[Observed]) -> list[list[Observed]]:
    groups: list[list[Observed]] = []
    last_step = -1.0
    for one in lines:
        step = one.numbers.get("step", last_step) if one.kind is Kind.STEP else last_step
        if not groups or step < last_step or _begins_again(groups[-1], one):
            groups.append([])
            last_step = -1.0
        groups[-1].append(one)
        last_step = one.numbers.get("step", last_step) if one.kind is Kind.STEP else last_step
    return groups


def _begins_again(group: Sequence[Observed], one: Observed) -> bool:
    """A start-up line after the start-up is over: of a kind already seen, or later than start-ups take."""
    if one.kind not in BEGINNINGS:
        return False
    if any(earlier.kind is one.kind for earlier in group):
        return True
    begun = next((earlier.time for earlier in group if earlier.time is not None), None)
    return begun is not None and one.time is not None and one.time - begun > SAME_START


def find_contradictions(
    launches: Sequence[InferredLaunch], observations: Sequence[Observed], scripts: Sequence[tuple[str, str]] = ()
) -> tuple[Contradiction, ...]:
    """Everything that does not fit together. `scripts` are (path, line) of telling lines in source files."""
    found = [
        *_targets_against_models(launches),
        *_changed_targets(launches),
        *_readers_against_shards(launches),
        *_ends_without_a_word(launches),
        *_processes_older_than_launches(launches, observations),
        *_devices_in_scripts(launches, scripts),
        *_dead_channels(launches),
    ]
    return tuple(found)


def _targets_against_models(launches: Sequence[InferredLaunch]) -> Iterable[Contradiction]:
    created = [one for launch in launches for one in launch.observations if one.kind is Kind.CREATED]
    for launch in launches:
        target = launch.number_of(Kind.TARGET, "params")
        own = launch.number_of(Kind.CREATED, "params")
        if target is None or target == own:
            continue
        planned = launch.first(Kind.TARGET)
        assert planned is not None
        if own is None:
            if not any(one.numbers.get("params") == target for one in created):
                text = f"launch {launch.number}: {target:,.0f} parameters were a target; no line says this model was created"
                yield Contradiction(text=text, follows_from=(_place(planned),))
            continue
        world = _world_of(target, own)
        made = launch.first(Kind.CREATED)
        assert made is not None
        if world:
            text = (
                f"launch {launch.number}: {own:,.0f} is {target:,.0f} divided by {world} and rounded up: "
                f"the count of one of {world} ranks after sharding, not a smaller model"
            )
        else:
            text = f"launch {launch.number}: target {target:,.0f}, created {own:,.0f} ({own / target - 1:+.0%})"
        yield Contradiction(text=text, follows_from=(_place(planned), _place(made)))


def _world_of(whole: float, part: float) -> int | None:
    return next((size for size in range(2, 1025) if math.ceil(whole / size) == part), None)


def _changed_targets(launches: Sequence[InferredLaunch]) -> Iterable[Contradiction]:
    planned = [(launch, launch.first(Kind.TARGET)) for launch in launches if launch.first(Kind.TARGET) is not None]
    for (earlier, before), (later, after) in pairwise(planned):
        assert before is not None and after is not None
        old, new = before.numbers.get("params"), after.numbers.get("params")
        if old and new and old != new:
            between = f"between launch {earlier.number} and {later.number}"
            text = f"{between} the target went {old:,.0f} → {new:,.0f}; no line says why"
            yield Contradiction(text=text, follows_from=(_place(before), _place(after)))


def _readers_against_shards(launches: Sequence[InferredLaunch]) -> Iterable[Contradiction]:
    for launch in launches:
        for one in launch.observations:
            shards, workers = one.numbers.get("shards"), one.numbers.get("workers")
            if one.kind is not Kind.WORKERS or shards is None or workers is None:
                continue
            devices = next((other.number_of(Kind.HARDWARE, "devices") for other in launches[: launch.number][::-1]
                            if other.number_of(Kind.HARDWARE, "devices")), None)  # fmt: skip
            readers = f"; on {devices:.0f} ranks that is {workers * devices:.0f} readers" if devices else ""
            text = f"launch {launch.number}: {workers:.0f} loader workers for {shards:.0f} data shards{readers}"
            yield Contradiction(text=text, follows_from=(_place(one),))


def _ends_without_a_word(launches: Sequence[InferredLaunch]) -> Iterable[Contradiction]:
    by_source: dict[str, list[InferredLaunch]] = {}
    for launch in launches:
        by_source.setdefault(launch.source, []).append(launch)
    for own in by_source.values():
        for earlier, later in pairwise(own):
            if earlier.ending is None:
                text = (
                    f"launch {later.number} begins in the same log although launch {earlier.number} never says "
                    "that it ended: a silent restart"
                )
                places = (_place(earlier.observations[-1]), _place(later.observations[0]))
                yield Contradiction(text=text, follows_from=places)


def _processes_older_than_launches(
    launches: Sequence[InferredLaunch], observations: Sequence[Observed]
) -> Iterable[Contradiction]:
    listed = [one for one in observations if one.kind is Kind.PROCESS and one.time is not None]
    latest = max((launch.started for launch in launches if launch.started is not None), default=None)
    if latest is None or not listed:
        return
    old = [one for one in listed if one.time is not None and one.time.replace(year=latest.year) < latest]
    if old:
        first = min(old, key=lambda one: one.time or datetime.max)
        assert first.time is not None
        text = (
            f"{len(old)} listed processes are older than the last launch (the oldest of {first.time:%H:%M:%S}, "
            f"the launch of {latest:%H:%M:%S}): left by an earlier one, not made by it"
        )
        yield Contradiction(text=text, follows_from=tuple(_place(one) for one in old[:3]))


def _dead_channels(launches: Sequence[InferredLaunch]) -> Iterable[Contradiction]:
    """`K=0.000` in every step line: something that is said to be measured and is not."""
    for launch in launches:
        steps = [one for one in launch.observations if one.kind is Kind.STEP]
        rows = [dict(CHANNEL.findall(one.text)) for one in steps]
        dead = [name for name in rows[0] if all(float(row.get(name, "nan")) == 0 for row in rows)] if len(rows) >= 3 else []
        if dead:
            named = ", ".join(f"{name}={rows[0][name]}" for name in dead)
            text = f"launch {launch.number}: {named} in all {len(rows)} step lines: logged and not measured"
            yield Contradiction(text=text, follows_from=(_place(steps[0]), _place(steps[-1])))


def _devices_in_scripts(launches: Sequence[InferredLaunch], scripts: Sequence[tuple[str, str]]) -> Iterable[Contradiction]:
    claimed = max((launch.number_of(Kind.HARDWARE, "devices") or 0 for launch in launches), default=0)
    for path, line in scripts:
        if "device_ids=[0]" in line.replace(" ", ""):
            said = f"logs speak of {claimed:.0f} devices; " if claimed > 1 else ""
            yield Contradiction(text=f"{said}`{path}` uses one: `{line.strip()[:120]}`", follows_from=(path,))


def list_unknowns(launches: Sequence[InferredLaunch]) -> tuple[str, ...]:
    """What the files do not tell; each is a question, not an answer."""
    unknown = []
    for launch in launches:
        if launch.first(Kind.STEP) is None:
            unknown.append(f"launch {launch.number}: whether a single step was taken (no line with step and loss)")
        if launch.ending is None:
            unknown.append(f"launch {launch.number}: how and when it ended")
    if not any(launch.first(Kind.SAVED) for launch in launches):
        unknown.append("whether anything was saved: no line says so, and that proves nothing")
    return tuple(unknown)


def _place(one: Observed) -> str:
    return f"{one.source}:{one.line}"

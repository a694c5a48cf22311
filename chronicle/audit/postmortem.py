"""Post-mortem of a directory without a journal: launches inferred from logs, contradictions, and a Markdown draft.

Observed, inferred and unknown are kept in separate sections. Every inferred sentence names the lines it follows from.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise

from chronicle.audit.traces import CLOCK, STAMP, DirectoryScan, LineKind, LogTrace

__all__ = [
    "Contradiction",
    "InferredLaunch",
    "find_contradictions",
    "infer_launches",
    "list_timeline",
    "list_unknowns",
    "write_draft",
]

CHANNEL = re.compile(r"\b([A-Za-z_]\w*)\s*=\s*(-?\d+(?:\.\d+)?)\b")
REACHED = (
    (LineKind.STEP, "stepped"),
    (LineKind.LOOP, "entered the training loop"),
    (LineKind.CREATED, "created its model"),
)
ENDINGS = (LineKind.ENDED, LineKind.ERROR, LineKind.MEMORY)
BEGINNINGS = (LineKind.TARGET, LineKind.CONFIG, LineKind.HARDWARE)
SAME_START = timedelta(seconds=5)  # duration of a program's start-up lines
SAME_LAUNCH = timedelta(minutes=2)  # between the first lines of the ranks of one launch
# what tells the log of a rank from the logs of the others: `rank-3.log`, `worker_1.out`, torchrun's `attempt_0/3/stderr.log`
RANK_PART = re.compile(
    r"(?i)(?<![a-z])(?:local_?)?(?:rank|worker|proc|process|task|gpu|node|host)[-_.]?\d+|(?<=attempt_\d/)\d+(?=/)"
)
STREAM_PART = re.compile(r"(?i)\b(?:stdout|stderr)\b|\.(?:out|err)$")
FROM_OTHER_RANKS = (LineKind.ERROR, LineKind.MEMORY, LineKind.WORKERS, LineKind.ENDED)


@dataclass(frozen=True, slots=True, kw_only=True)
class InferredLaunch:
    """One start of a program, inferred from its log."""

    number: int
    source: str
    observations: tuple[LogTrace, ...]
    others: tuple[str, ...] = ()  # logs of its other ranks

    def first(self, kind: LineKind) -> LogTrace | None:
        """Return the first observation of a kind."""
        return next((one for one in self.observations if one.kind is kind), None)

    def number_of(self, kind: LineKind, name: str) -> float | None:
        """Return a number of the first observation of a kind."""
        found = self.first(kind)
        return None if found is None else found.numbers.get(name)

    @property
    def started(self) -> datetime | None:
        """Return the first time written in its lines."""
        return next((one.time for one in self.observations if one.time is not None), None)

    @property
    def reached(self) -> str:
        """Return how far it came according to its lines: planned < created < training loop < stepped."""
        planned = any(one.kind in BEGINNINGS for one in self.observations)
        least = "only planned, according to its lines" if planned else "how far it came is not known"
        return next((word for kind, word in REACHED if self.first(kind) is not None), least)

    @property
    def ending(self) -> LogTrace | None:
        """Return the line that ends it; None when there is none."""
        return next((one for one in reversed(self.observations) if one.kind in ENDINGS), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contradiction:
    """A contradiction between lines, or an interpretation that the numbers exclude."""

    text: str
    follows_from: tuple[str, ...]


def infer_launches(observations: Iterable[LogTrace]) -> tuple[InferredLaunch, ...]:
    """Group the lines of each log into launches, in order of time where it is known.

    A new launch begins where a log has another start-up line of a kind already seen, or where the step decreases. Logs whose
    names differ only in the rank, and that begin together, are one launch.
    """
    by_source: dict[str, list[LogTrace]] = {}
    for one in observations:
        if one.kind not in (LineKind.PROCESS, LineKind.WRITTEN):
            by_source.setdefault(one.source, []).append(one)
    merged: list[tuple[list[LogTrace], list[str]]] = []
    families: dict[str, list[int]] = {}
    for source in sorted(by_source, key=_in_order_of_ranks):
        family = STREAM_PART.sub("*", RANK_PART.sub("*", source))
        mine = families.setdefault(family, [])
        free = list(mine) if family != source else []
        for group in _split(by_source[source]):
            place = next((place for place in free if _began_together(merged[place][0], group)), None)
            if place is None:
                mine.append(len(merged))
                merged.append((group, []))
                continue
            free = free[free.index(place) + 1 :]
            merged[place][0].extend(one for one in group if one.kind in FROM_OTHER_RANKS or not _has_steps(merged[place][0]))
            merged[place][1].append(source)
    merged.sort(key=lambda pair: (_begun(pair[0]) or datetime.max, pair[0][0].source))
    return tuple(
        InferredLaunch(number=number, source=group[0].source, observations=tuple(group), others=tuple(others))
        for number, (group, others) in enumerate(merged, start=1)
    )


def _in_order_of_ranks(source: str) -> tuple[str, list[int]]:
    return RANK_PART.sub("*", source), [int(digits) for digits in re.findall(r"\d+", source)]


def _begun(group: Sequence[LogTrace]) -> datetime | None:
    return next((one.time for one in group if one.time is not None), None)


def _has_steps(group: Sequence[LogTrace]) -> bool:
    return any(one.kind is LineKind.STEP for one in group)


def _began_together(group: Sequence[LogTrace], other: Sequence[LogTrace]) -> bool:
    """Whether the lines of two ranks are of one launch: by their first times; without times, by their first steps."""
    mine, theirs = _begun(group), _begun(other)
    if mine is not None and theirs is not None:
        return abs(mine - theirs) <= SAME_LAUNCH
    steps = [next((one.numbers.get("step") for one in lines if one.kind is LineKind.STEP), None) for lines in (group, other)]
    return None in steps or steps[0] == steps[1]


def _split(lines: Sequence[LogTrace]) -> list[list[LogTrace]]:
    groups: list[list[LogTrace]] = []
    last_step = -1.0
    for one in lines:
        step = one.numbers.get("step", last_step) if one.kind is LineKind.STEP else last_step
        if not groups or step < last_step or _begins_again(groups[-1], one):
            groups.append([])
            last_step = -1.0
        groups[-1].append(one)
        last_step = one.numbers.get("step", last_step) if one.kind is LineKind.STEP else last_step
    return groups


def _begins_again(group: Sequence[LogTrace], one: LogTrace) -> bool:
    """Return whether a start-up line begins a new launch: its kind was seen already, or the start-up is over."""
    if one.kind is LineKind.CREATED:
        return _has_steps(group)
    if one.kind not in BEGINNINGS:
        return False
    if any(earlier.kind is one.kind for earlier in group):
        return True
    begun = next((earlier.time for earlier in group if earlier.time is not None), None)
    return begun is not None and one.time is not None and one.time - begun > SAME_START


def find_contradictions(
    launches: Sequence[InferredLaunch], observations: Sequence[LogTrace], scripts: Sequence[tuple[str, str]] = ()
) -> tuple[Contradiction, ...]:
    """Find all contradictions. `scripts` are (path, line) of relevant lines in source files."""
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
    created = [one for launch in launches for one in launch.observations if one.kind is LineKind.CREATED]
    for launch in launches:
        target = launch.number_of(LineKind.TARGET, "params")
        own = launch.number_of(LineKind.CREATED, "params")
        if target is None or target == own:
            continue
        planned = launch.first(LineKind.TARGET)
        assert planned is not None
        if own is None:
            if not any(one.numbers.get("params") == target for one in created):
                text = f"launch {launch.number}: {target:,.0f} parameters were a target; no line says this model was created"
                yield Contradiction(text=text, follows_from=(_place(planned),))
            continue
        world = _world_of(target, own)
        made = launch.first(LineKind.CREATED)
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
    planned = [(launch, launch.first(LineKind.TARGET)) for launch in launches if launch.first(LineKind.TARGET) is not None]
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
            if one.kind is not LineKind.WORKERS or shards is None or workers is None:
                continue
            devices = next((other.number_of(LineKind.HARDWARE, "devices") for other in launches[: launch.number][::-1]
                            if other.number_of(LineKind.HARDWARE, "devices")), None)  # fmt: skip
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
                    f"launch {later.number} begins in the same log, but no line says that launch {earlier.number} "
                    "ended: a silent restart"
                )
                places = (_place(earlier.observations[-1]), _place(later.observations[0]))
                yield Contradiction(text=text, follows_from=places)


def _processes_older_than_launches(
    launches: Sequence[InferredLaunch], observations: Sequence[LogTrace]
) -> Iterable[Contradiction]:
    listed = [one for one in observations if one.kind is LineKind.PROCESS and one.time is not None]
    latest = max((launch.started for launch in launches if launch.started is not None), default=None)
    if latest is None or not listed:
        return
    old = [one for one in listed if one.time is not None and one.time.replace(year=latest.year) < latest]
    if old:
        first = min(old, key=lambda one: one.time or datetime.max)
        assert first.time is not None
        text = (
            f"{len(old)} listed processes are older than the last launch (the oldest of {first.time:%H:%M:%S}, "
            f"the launch of {latest:%H:%M:%S}): left by an earlier launch"
        )
        yield Contradiction(text=text, follows_from=tuple(_place(one) for one in old[:3]))


def _dead_channels(launches: Sequence[InferredLaunch]) -> Iterable[Contradiction]:
    """Find channels that are 0 in every step line (`K=0.000`): logged but not measured."""
    for launch in launches:
        steps = [one for one in launch.observations if one.kind is LineKind.STEP]
        rows = [dict(CHANNEL.findall(one.text)) for one in steps]
        dead = [name for name in rows[0] if all(float(row.get(name, "nan")) == 0 for row in rows)] if len(rows) >= 3 else []
        if dead:
            named = ", ".join(f"{name}={rows[0][name]}" for name in dead)
            text = f"launch {launch.number}: {named} in all {len(rows)} step lines: logged but not measured"
            yield Contradiction(text=text, follows_from=(_place(steps[0]), _place(steps[-1])))


def _devices_in_scripts(launches: Sequence[InferredLaunch], scripts: Sequence[tuple[str, str]]) -> Iterable[Contradiction]:
    claimed = max((launch.number_of(LineKind.HARDWARE, "devices") or 0 for launch in launches), default=0)
    for path, line in scripts:
        if "device_ids=[0]" in line.replace(" ", ""):
            said = f"logs name {claimed:.0f} devices; " if claimed > 1 else ""
            yield Contradiction(text=f"{said}`{path}` uses one: `{line.strip()[:120]}`", follows_from=(path,))


def list_unknowns(launches: Sequence[InferredLaunch]) -> tuple[str, ...]:
    """List what the files do not show."""
    unknown = []
    for launch in launches:
        if launch.first(LineKind.STEP) is None:
            unknown.append(f"launch {launch.number}: whether a single step was taken (no line with step and loss)")
        if launch.ending is None:
            unknown.append(f"launch {launch.number}: how and when it ended")
    if not any(launch.first(LineKind.SAVED) for launch in launches):
        unknown.append("whether anything was saved: no line reports a save")
    return tuple(unknown)


def _place(one: LogTrace) -> str:
    return f"{one.source}:{one.line}"


# --- Timeline and draft

MOST_ALIKE = 3  # similar lines in a row that are shown
MOST_FILES = 20
MOST_WRITTEN = 20
MOST_SCRIPT_LINES = 20
LEADING_LEVEL = re.compile(r"^[\s,.:|\d-]*(?=\S)")


def list_timeline(scan: DirectoryScan, launches: Sequence[InferredLaunch]) -> list[tuple[datetime, str, str]]:
    """Return (time, place, text) in order of time. Times without a year get the year of the first dated launch."""
    year = next((launch.started.year for launch in launches if launch.started), datetime.min.year)
    rows = [
        (one.time.replace(year=year) if one.time.year == 1900 else one.time, f"{one.source}:{one.line}", text)
        for one, text in _shown(scan.observations)
        if one.time is not None
    ]
    for file in scan.files[-MOST_FILES:]:
        rows.append((file.changed.replace(microsecond=0), file.path, f"file last changed, {file.size_bytes:,} bytes"))
    for process in scan.processes:
        orphan = ", orphan" if process.orphan else ""
        what = f"process started, alive now{orphan}: {process.command[:100]}"
        rows.append((process.started.replace(microsecond=0), f"pid {process.pid}", what))
    return sorted(rows)


def _shown(observations: Sequence[LogTrace]) -> Iterator[tuple[LogTrace, str]]:
    """Yield each observation with its text without time; of many steps or processes in a row only the first and last."""
    alike: list[LogTrace] = []
    for one in [*observations, None]:
        same = one is not None and alike and (one.kind, one.source) == (alike[-1].kind, alike[-1].source)
        if not same:
            yield from _few(alike)
            alike = []
        if one is not None and one.kind in (LineKind.STEP, LineKind.PROCESS):
            alike.append(one)
        elif one is not None:
            yield one, _without_time(one.text)


def _few(alike: Sequence[LogTrace]) -> Iterator[tuple[LogTrace, str]]:
    if len(alike) <= MOST_ALIKE + 1:
        yield from ((one, _without_time(one.text)) for one in alike)
        return
    yield from ((one, _without_time(one.text)) for one in alike[:MOST_ALIKE])
    yield alike[-1], f"({len(alike) - MOST_ALIKE - 1} like these between) {_without_time(alike[-1].text)}"


def _without_time(text: str) -> str:
    """Return the line without its time, which the draft shows in front."""
    for stamp in (STAMP, CLOCK):
        match = stamp.search(text)
        if match is not None and match.end() < len(text):
            return (text[: match.start()] + LEADING_LEVEL.sub("", text[match.end() :])).strip() or text
    return text


def write_draft(
    scan: DirectoryScan,
    launches: Sequence[InferredLaunch],
    contradictions: Sequence[Contradiction],
    unknowns: Sequence[str],
    recorded: Sequence[str] = (),
) -> str:
    """Return the Markdown draft. `recorded`: what the journals in the directory tell. A person adds causes and decisions."""
    lines = [f"# Post-mortem draft: `{scan.directory}`", ""]
    lines += ["## Recorded by chronicle", "", *recorded, ""] if recorded else []
    zone = datetime.now().astimezone().tzname()
    lines += ["## Observed", "", f"Lines, files and processes. Times of lines are as written, of files in {zone}.", ""]
    lines += [f"- {time:%Y-%m-%d %H:%M:%S} · {what} · `{place}`" for time, place, what in list_timeline(scan, launches)]
    untimed = [(one, text) for one, text in _shown(scan.observations) if one.time is None]
    lines += ["", "### Without a time", ""] if any(one.kind is not LineKind.WRITTEN for one, _ in untimed) else []
    lines += [f"- {text} · `{one.source}:{one.line}`" for one, text in untimed if one.kind is not LineKind.WRITTEN]
    written = [(one, text) for one, text in untimed if one.kind is LineKind.WRITTEN]
    lines += ["", "### Written by people (no events)", ""] if written else []
    lines += [f"- {text} · `{one.source}:{one.line}`" for one, text in written[:MOST_WRITTEN]]
    lines += [f"- {len(written) - MOST_WRITTEN} more"] if len(written) > MOST_WRITTEN else []
    lines += ["", "### Devices and loaders in scripts", ""] if scan.scripts else []
    lines += [f"- {line.strip()[:160]} · `{place}`" for place, line in scan.scripts[:MOST_SCRIPT_LINES]]
    lines += ["", "## Inferred", ""]
    lines += [_inferred(one) for one in launches] or ["- nothing"]
    lines += ["", "### Contradictions", ""]
    lines += [f"- {one.text} · from {_refs(one)}" for one in contradictions] or ["- none found"]
    lines += ["", "## Unknown", ""]
    lines += [f"- {text}" for text in unknowns] or ["- nothing found by these checks"]
    lines += [f"- {text}" for text in scan.left_out]
    lines += ["", "## Cause", "", "_Not determined by this draft._", ""]
    return "\n".join(lines)


def _last_word(launch: InferredLaunch) -> str:
    ending = launch.ending
    return "" if ending is None else f"; last line: {_without_time(ending.text)[:160]} (`{ending.source}:{ending.line}`)"


def _inferred(launch: InferredLaunch) -> str:
    others = f" and {len(launch.others)} logs of its other ranks" if launch.others else ""
    return f"- launch {launch.number} ({launch.source}{others}): {_when(launch)}; {launch.reached}{_last_word(launch)}"


def _when(launch: InferredLaunch) -> str:
    return "time unknown" if launch.started is None else f"from {launch.started:%Y-%m-%d %H:%M:%S}"


def _refs(one: Contradiction) -> str:
    return ", ".join(f"`{ref}`" for ref in one.follows_from)

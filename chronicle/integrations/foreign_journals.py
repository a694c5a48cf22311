"""What an importer returns: drafts of entries, and points cut into launches. Values only."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from chronicle.metrics import Point

__all__ = ["Draft", "Import", "ImportedLaunch", "cut_into_launches", "parse_moment"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """An entry before it has an id. `moment` None = the source gives no date."""

    kind: str
    title: str = ""
    moment: datetime | None = None
    step: int | None = None
    launch: int | None = None
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedLaunch:
    """Points of one start of a process, in the order in which they were logged."""

    points: Sequence[Point]
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """One source. `launches` are only cut here; their numbers are given when they are written."""

    format: str
    drafts: tuple[Draft, ...] = ()
    launches: tuple[ImportedLaunch, ...] = ()


def cut_into_launches(points: Iterable[Point], name: str = "") -> tuple[ImportedLaunch, ...]:
    """A step before the last one, or another launch number, begins a new launch: that is a restart.

    The same step again does not: several lines a step, and curves read off plots, look like that too.
    """
    launches: list[list[Point]] = []
    last: Point | None = None
    for point in points:
        if last is None or point.step < last.step or point.launch != last.launch:
            launches.append([])
        launches[-1].append(point)
        last = point
    return tuple(ImportedLaunch(points=tuple(part), name=name) for part in launches)


def parse_moment(text: str) -> datetime | None:
    """A date or a time with offset; a date without time is its midnight in UTC."""
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        return None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)

"""Read the evidence of a run: the records of its ranks, its journal and its per-step logs. Claims are judged on it.

Each observation keeps its place (`launches/0003/evidence/rank-0.jsonl:2`, or a journal entry's id), so that a verdict can
name its evidence. Partial lines and lines of another version are skipped, and files that are not what the journal sealed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chronicle.audit.rank import VERSION
from chronicle.journal import Entry, Journal, compute_lineage
from chronicle.metrics.log import read_metrics
from chronicle.paths import RunPaths, list_launch_numbers
from rollback.channels import Role, value_of

EVIDENCE_FILE = re.compile(r"(rank-\d+|host-[\w.-]+)\.jsonl")
HOST = -1  # rank of records written by a host's supervisor


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One line that a rank wrote (rank −1: a host's supervisor). `ref`: file below the run directory, and line from 1."""

    ref: str
    rank: int
    kind: str
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchEvidence:
    """Evidence of one launch: observations of its ranks, and steps and losses of its per-step log."""

    launch: int
    observations: tuple[Observation, ...] = ()
    first_step: int | None = None
    last_step: int | None = None
    last_loss: float | None = None
    best_loss: float | None = None
    metrics_ref: str = ""
    broken: str = ""  # which files are not what the journal sealed; nothing of them is in `observations`

    def of_kind(self, kind: str) -> tuple[Observation, ...]:
        """Return the observations of one kind, rank by rank in the order written."""
        return tuple(one for one in self.observations if one.kind == kind)

    def newest(self, kind: str) -> dict[int, Observation]:
        """Return the last observation of a kind for each rank."""
        return {one.rank: one for one in self.of_kind(kind)}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvidence:
    """Evidence of all launches of a run. `kept`: launches with steps in the lineage; `head_step`: its last step."""

    run: str
    launches: tuple[LaunchEvidence, ...] = ()
    kept: tuple[int, ...] = ()
    head_step: int = 0
    entries: tuple[Entry, ...] = field(default=())

    @property
    def scope(self) -> tuple[LaunchEvidence, ...]:
        """Return the launches that a claim refers to: those of the lineage, or all when there is no lineage yet."""
        chosen = tuple(one for one in self.launches if one.launch in self.kept)
        return chosen or self.launches


def read_evidence(paths: RunPaths, journal: Journal) -> RunEvidence:
    """Read the evidence of all launches."""
    from chronicle.launch.record import broken_seals  # most commands read none

    broken = broken_seals(paths, journal.entries, lambda path: path.endswith(".jsonl"))
    launches = tuple(_read_launch(paths, number, broken) for number in list_launch_numbers(paths))
    observed = {
        one.launch: (one.first_step, one.last_step)
        for one in launches
        if one.first_step is not None and one.last_step is not None
    }
    lineage = compute_lineage(journal.entries, observed)
    kept = tuple(dict.fromkeys(interval.launch for interval in lineage.kept))
    return RunEvidence(
        run=journal.run, launches=launches, kept=kept, head_step=lineage.head_step, entries=tuple(journal.entries)
    )


def _read_launch(paths: RunPaths, number: int, broken: Mapping[str, str]) -> LaunchEvidence:
    steps: list[int] = []
    losses: list[float] = []
    prefix = _ref(paths, paths.launch_dir(number)) + "/"
    changed = {path: problem for path, problem in broken.items() if path.startswith(prefix)}
    try:
        is_sealed = _ref(paths, paths.metrics_path(number)) not in changed
        for point in read_metrics(paths.metrics_path(number)) if is_sealed else ():
            steps.append(point.step)
            loss = value_of(point.values, Role.LOSS)
            if loss is not None and loss == loss:
                losses.append(loss)
    except OSError:
        pass  # no per-step log: steps and loss are unknown
    return LaunchEvidence(
        launch=number,
        observations=tuple(_read_ranks(paths, paths.launch_dir(number) / "evidence", changed)),
        first_step=min(steps, default=None),
        last_step=max(steps, default=None),
        last_loss=losses[-1] if losses else None,
        best_loss=min(losses, default=None),
        metrics_ref=_ref(paths, paths.metrics_path(number)) if steps else "",
        broken="; ".join(changed.values()),
    )


def _read_ranks(paths: RunPaths, directory: Path, changed: Mapping[str, str]) -> Iterator[Observation]:
    for path in sorted(directory.glob("*.jsonl"), key=lambda one: (len(one.name), one.name)):
        place = _ref(paths, path)
        if EVIDENCE_FILE.fullmatch(path.name) is None or place in changed:
            continue
        for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
            fields = _parse(line)
            if fields is not None:
                yield Observation(ref=f"{place}:{number}", rank=fields["rank"], kind=fields["kind"], fields=fields)


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        fields = json.loads(line)
    except ValueError:
        return None
    if not isinstance(fields, dict) or fields.get("v") != VERSION:
        return None
    fields.setdefault("rank", HOST)
    known = isinstance(fields["rank"], int) and isinstance(fields.get("kind"), str)
    return fields if known else None


def _ref(paths: RunPaths, path: Path) -> str:
    return path.relative_to(paths.run_dir).as_posix()

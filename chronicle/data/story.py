"""The data plan in the journal: what each launch set out to read, and what that makes of the run.

The trainer writes one `data.start` entry a launch (plan, segments, first step); where a launch ended is told by its own
metrics. From both, `read_readings` rebuilds the history that `usage` counts.
"""

from __future__ import annotations

from chronicle.data.errors import DataError
from chronicle.data.plan import DataPlan
from chronicle.data.segments import Segments
from chronicle.data.usage import Reading, restart_lines
from chronicle.journal import JournalWriter, read_journal
from chronicle.metrics import read_metrics
from chronicle.paths import RunPaths

KIND = "data.start"


def has_plan(paths: RunPaths) -> bool:
    """Whether some launch told its data plan."""
    return bool(list(read_journal(paths).of_kind(KIND)))


def read_readings(paths: RunPaths) -> tuple[DataPlan, list[Reading]]:
    """Return the plan and what each launch read, oldest first. Raises DataError where no launch told its plan."""
    entries = list(read_journal(paths).of_kind(KIND))
    if not entries:
        raise DataError(f"run `{paths.run}` has no data plan in its journal",
                        "launches of bit_transformer and of `chronicle.data` tell theirs, `chronicle.data.observe` others")
    readings = []
    for entry in entries:
        first = int(entry.data["first_step"])
        launch = entry.launch or 0
        readings.append(Reading(launch=launch, first_step=first, end_step=max(first, _last_step(paths, launch)),
                                segments=Segments.from_json(entry.data["segments"])))
    return DataPlan.from_json(entries[-1].data["plan"]), readings


def write_start(paths: RunPaths, plan: DataPlan, segments: Segments, *, first_step: int, launch: int) -> str:
    """Append this launch's entry and return its sentence: from where it reads and what the restart cost."""
    now = Reading(launch=launch, first_step=first_step, end_step=first_step, segments=segments)
    try:
        known, before = read_readings(paths)
    except DataError:
        known, before = plan, []
    if before and known == plan:
        title = restart_lines(plan, [*before, now])[-1].text()
    else:
        title = f"launch {launch}: data_pos {segments.position(first_step)}, plan {plan.plan_hash[:12]}"
    JournalWriter(paths).append(KIND, step=first_step, launch=launch, title=title, data={
        "first_step": first_step, "plan": plan.to_json(), "plan_hash": plan.plan_hash, "segments": segments.to_json()})
    return title


def _last_step(paths: RunPaths, launch: int) -> int:
    path = paths.metrics_path(launch)
    return max((point.step for point in read_metrics(path)), default=0) if path.is_file() else 0

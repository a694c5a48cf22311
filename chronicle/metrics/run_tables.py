"""Tables that hold several runs: a panel's export (`alpha - train/loss`, `beta - train/loss`), and a table with a run column.

W&B's panels name a column `run - metric`. Other exports have one row for each run and step, some one for each metric
(`run,tag,step,value`): a long table, which may also hold one run only. Where a long table is sorted by tag, its steps begin
anew with each tag; that is no new launch. Any other table of one run is read by `records.read_csv`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from chronicle.metrics.log import Point, join_steps, number_rows
from chronicle.metrics.numbers import number_in
from chronicle.metrics.records import BANDS, BETWEEN, open_table

RUN_NAMES = ("run", "run_id", "run_name", "run name", "run id", "run_uuid")
TAG_NAMES = ("tag", "metric", "metric_name", "key", "name")
VALUE_NAMES = ("value", "metric_value")


def read_runs_of_table(path: Path) -> Mapping[str, Sequence[Point]] | None:
    """Points by run, in the order of the columns or rows; None where the file is no table, or one of one run that is not long.

    A long table without a run column is called as its file.
    """
    opened = open_table(path)
    if opened is None or opened[0].step_at is None:
        return None
    table, rows = opened
    lowered = [name.lower() for name in table.names]
    run_at, tag_at, value_at = (
        next((lowered.index(name) for name in known if name in lowered), None) for known in (RUN_NAMES, TAG_NAMES, VALUE_NAMES)
    )
    is_long = tag_at is not None and value_at is not None
    if run_at is None and not is_long:
        table.channels = [(at, name) for at, name in enumerate(table.names) if BETWEEN in name and not name.endswith(BANDS)]
    else:
        table.channels = [(at, name) for at, name in table.channels if at != run_at]
    if not table.channels:
        return None
    runs: dict[str, list[Point]] = {}
    for cells in rows:
        point = table.parse(cells, 0)
        if point is None:
            continue
        if is_long:
            value, run = number_in(_cell(cells, value_at)), path.stem if run_at is None else _cell(cells, run_at)
            found: Mapping[str, Mapping[str, float]] = {} if value is None else {run: {_cell(cells, tag_at): value}}
        elif run_at is not None:
            found = {_cell(cells, run_at): point.values}
        else:
            found = _by_panel(point.values)
        for run, values in found.items():
            if run and values:
                runs.setdefault(run, []).append(point._replace(values=values))
    if not runs or (len(runs) < 2 and not is_long):
        return None
    return {run: list(number_rows(join_steps(_beside(points) if is_long else points))) for run, points in runs.items()}


def _by_panel(values: Mapping[str, float]) -> Mapping[str, Mapping[str, float]]:
    """The values of a row by the run that their columns name."""
    found: dict[str, dict[str, float]] = {}
    for name, value in values.items():
        run, _, tag = name.rpartition(BETWEEN)
        found.setdefault(run, {})[tag] = value
    return found


def _cell(cells: Sequence[str], at: int | None) -> str:
    return "" if at is None or at >= len(cells) else cells[at].strip()


def _beside(points: list[Point]) -> list[Point]:
    """The points of a long table that is sorted by tag, with the tags beside one another; of any other table as they are.

    Where the steps of a tag go back, a later pass begins.
    """
    tags = [next(iter(point.values)) for point in points]
    blocks = [tag for at, tag in enumerate(tags) if at == 0 or tags[at - 1] != tag]
    if len(blocks) != len(set(blocks)) or len(blocks) < 2:
        return points
    passes: list[int] = []
    for at, point in enumerate(points):
        again = at > 0 and tags[at - 1] == tags[at]
        passes.append(passes[-1] + (point.step < points[at - 1].step) if again else 0)
    order = sorted(range(len(points)), key=lambda at: (passes[at], points[at].step))
    return [points[at] for at in order]

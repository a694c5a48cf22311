"""`chronicle diff`: what two checkpoints do not share, number by number."""

from pathlib import Path
from typing import Annotated

import typer

from chronicle.cli.inspect import checkpoint_named, settings_root
from chronicle.cli.options import CheckpointsOption, JsonOption, LogsOption, RunOption
from chronicle.cli.result import CommandResult
from rollback.errors import visible
from rollback.checks.inspection import Difference, compare_states
from rollback.checkpoint.rollback_state import read_state

__all__ = ["diff"]


def diff(
    a: Annotated[str, typer.Argument(help="One checkpoint: a path, a step, or STEP@LAUNCH.", metavar="A")],
    b: Annotated[str, typer.Argument(help="The other.", metavar="B")],
    run: RunOption = None,
    logs: LogsOption = None,
    checkpoints: CheckpointsOption = None,
    json: JsonOption = False,
) -> CommandResult:
    """Show the numbers in which two checkpoints differ: LRs, counters, RNG, topology, files.

    Example: chronicle diff checkpoints/opt_step-30250 checkpoints/opt_step-30500
    """
    one, other = (
        read_state(checkpoint_named(named, root, count_steps=False), allow_strays=True)
        for named, root in ((named, settings_root(named, run, logs, checkpoints)) for named in (a, b))
    )
    differences = compare_states(one, other)
    names = [_name(state.checkpoint.path) for state in (one, other)]
    return CommandResult(
        text=visible(_text(differences, names)),
        data={"a": str(one.checkpoint.path), "b": str(other.checkpoint.path),
              "differences": [difference.to_json() for difference in differences]},
    )  # fmt: skip


def _name(path: Path) -> str:
    return path.name


def _text(differences: list[Difference], names: list[str]) -> str:
    if not differences:
        return f"{names[0]} and {names[1]} say the same"
    rows = [("", *names)] + [(d.name, _value(d.before), _value(d.after)) for d in differences]
    widths = [min(60, max(len(row[i]) for row in rows)) for i in range(3)]
    return "\n".join("  ".join(cell.ljust(widths[i]) for i, cell in enumerate(row)).rstrip() for row in rows)


def _value(value: object) -> str:
    if value is None:
        return "–"
    text = f"{value:.10g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 60 else text[:57] + "…"

"""`chronicle apply`: carry out a plan that `chronicle rollback --plan-out` wrote, exactly as it was shown."""

import json as jsonlib
from pathlib import Path
from typing import Annotated

import typer

from chronicle.commands.carrying_out import carry_out
from chronicle.commands.options import CheckpointsOption, JsonOption, LogsOption, RunOption, YesOption, settings_from
from chronicle.commands.result import CommandResult
from chronicle.errors import ChronicleError
from chronicle.journal import Entry, read_journal
from chronicle.paths import RunPaths
from chronicle.rollbacks.ground import open_ground
from rollback.errors import PlanRefused
from rollback.plan import Plan

__all__ = ["apply"]


def apply(
    file: Annotated[Path, typer.Argument(help="The plan.", metavar="FILE")],
    force: Annotated[
        str | None, typer.Option("--force", help="Go on though the run seems alive; say why.", metavar="REASON")
    ] = None,
    yes: YesOption = False,
    run: RunOption = None,
    logs: LogsOption = None,
    checkpoints: CheckpointsOption = None,
    json: JsonOption = False,
) -> CommandResult:
    """Carry out a written plan; refused when anything it was made from has changed since. Twice is done once.

    Example: chronicle apply plan.json --yes
    """
    plan = _read_plan(file)
    settings = settings_from(run or plan.run, logs, checkpoints or Path(plan.root))
    done = _last_change(settings.paths)
    if done is not None and done.kind == "rollback.receipt" and done.data.get("plan") == plan.digest:
        return CommandResult(text=f"already carried out ({done.id}): nothing to do", data={"receipt": done.id})
    with open_ground(settings, force=force) as ground:
        if str(ground.root) != plan.root or settings.run != plan.run:
            raise PlanRefused(
                f"the plan is for run `{plan.run}` in `{plan.root}`, this is run `{settings.run}` in `{ground.root}`",
                "plan again here",
            )
        return carry_out(plan, ground, yes=yes)


def _last_change(paths: RunPaths) -> Entry | None:
    """The newest entry that changed checkpoints."""
    changes = list(read_journal(paths).of_kind("rollback.receipt", "undo.receipt", "recover.receipt"))
    return changes[-1] if changes else None


def _read_plan(path: Path) -> Plan:
    try:
        record = jsonlib.loads(path.read_bytes())
    except OSError as problem:
        raise ChronicleError(f"cannot read the plan `{path}`: {problem.strerror}") from problem
    except ValueError as problem:
        raise ChronicleError(f"`{path}` is no plan: {problem}") from problem
    if not isinstance(record, dict):
        raise ChronicleError(f"`{path}` is no plan: expected an object")
    digest = record.pop("digest", None)
    plan = Plan.from_json(record)
    if digest != plan.digest:
        raise PlanRefused(f"`{path}` was changed after it was planned: its digest is another", "plan again")
    return plan

"""`chronicle rollback`: find, verify, plan, show, ask, record, apply."""

import json as jsonlib
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from chronicle.cli.carrying_out import carry_out
from chronicle.cli.completion import complete_steps
from chronicle.cli.options import CheckpointsOption, JsonOption, LogsOption, RunOption, YesOption
from chronicle.cli.progress import read_every_byte
from chronicle.cli.recorded import settings_with_checkpoints
from chronicle.cli.result import CommandResult
from chronicle.errors import UsageProblem
from chronicle.cli.transaction import open_ground
from chronicle.cli.planning import make_plan
from rollback.disk.durable import REAL_DISK
from rollback.plan.plan import Plan
from rollback.plan.text import format_plan
from rollback.plan.request import RollbackRequest

__all__ = ["rollback"]

TARGET = re.compile(r"(\d+)(?:@(\w+))?")


def rollback(
    to: Annotated[
        str,
        typer.Option(
            "--to",
            help="Step to go back to; STEP@LAUNCH or a path picks one of several.",
            metavar="N",
            autocompletion=complete_steps,
        ),
    ],
    lr_scale: Annotated[
        float | None, typer.Option("--lr-scale", help="Multiply every LR by this.", metavar="F")
    ] = None,
    lr: Annotated[float | None, typer.Option("--lr", help="Continue with exactly this LR.", metavar="X")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Give one field a value (repeatable).", metavar="FIELD=VALUE")
    ] = None,
    keep_later: Annotated[bool, typer.Option("--keep-later", help="Leave later checkpoints where they are.")] = False,
    warmup: Annotated[int, typer.Option("--warmup", help="Warm the LR up again over N steps.", metavar="N")] = 0,
    skip_batches: Annotated[int, typer.Option("--skip-batches", help="Leave out the data of N steps.", metavar="N")] = 0,
    reshuffle: Annotated[bool, typer.Option("--reshuffle", help="Continue in another data order.")] = False,
    accept_change: Annotated[
        list[str] | None,
        typer.Option("--accept-change", help="Difference the guard is to accept, `name: reason` (repeatable)."),
    ] = None,
    verify: Annotated[
        str,
        typer.Option(
            "--verify",
            help="full: read every byte; quick: do not; auto: only if `chronicle verify` has not since the last change.",
            metavar="HOW",
        ),
    ] = "auto",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan, change nothing.")] = False,
    plan_out: Annotated[Path | None, typer.Option("--plan-out", help="Write the plan for `chronicle apply`.")] = None,
    deepspeed_config: Annotated[
        Path | None,
        typer.Option(
            "--deepspeed-config", help="Config of the next launch, where DeepSpeed's own scheduler has its LRs.", metavar="FILE"
        ),
    ] = None,
    force: Annotated[
        str | None, typer.Option("--force", help="Go on though the run seems alive; say why.", metavar="REASON")
    ] = None,
    yes: YesOption = False,
    run: RunOption = None,
    logs: LogsOption = None,
    checkpoints: CheckpointsOption = None,
    json: JsonOption = False,
) -> CommandResult:
    """Go back to a checkpoint: scale its LR everywhere it lives, move later checkpoints aside, all or nothing.

    Example: chronicle rollback --to 30500 --lr-scale 0.5

    The checkpoint of another launch: chronicle rollback --to 30500@8 --dry-run
    """
    step, launch, abandoned_by, path = _target(to)
    if verify not in ("auto", "quick", "full"):
        raise UsageProblem(f"--verify {verify}: expected auto, quick or full")
    request = RollbackRequest(
        step=step,
        launch=launch,
        lr_scale=lr_scale,
        lr=lr,
        sets=_sets(set_ or ()),
        keep_later=keep_later,
        warmup_steps=warmup,
        skip_batches=skip_batches,
        reshuffle=reshuffle,
        accept_change=tuple(accept_change or ()),
    )
    settings = settings_with_checkpoints(run, logs, checkpoints)
    if deepspeed_config is not None:
        origin = {**settings.origin, "deepspeed_config": "flag"}
        settings = replace(settings, deepspeed_config=deepspeed_config.absolute(), origin=origin)
    only_look = dry_run or plan_out is not None
    # Without a terminal and without --yes nothing is created either: the plan is made, shown and not carried out.
    looking = only_look or (not yes and not sys.stdin.isatty())
    with open_ground(settings, force=force, writing=not looking) as ground:
        settings.need_checkpoints()  # after the ground: an interrupted transaction may have the root out of sight
        plan = make_plan(request, ground, abandoned_by=abandoned_by, path=path, verify=verify, read=read_every_byte)
        if plan_out is not None:
            _write_plan(plan, plan_out)
        if only_look:
            return _shown(plan, plan_out)
        return carry_out(plan, ground, yes=yes)


def _shown(plan: Plan, written: Path | None) -> CommandResult:
    talk = (
        "nothing was changed" if written is None else f"plan written to {written}; carry it out with `chronicle apply`"
    )
    return CommandResult(text=format_plan(plan), data=plan.to_json() | {"digest": plan.digest}, talk=(talk,))


def _target(text: str) -> tuple[int, int | None, str | None, Path | None]:
    """(step, launch, rollback id, path): `30500`, `30500@8`, `30500@` and the end of the id that abandoned it, or a path."""
    found = TARGET.fullmatch(text.strip())
    if found is None and os.path.lexists(text):
        return 0, None, None, Path(text)
    if found is None:
        raise UsageProblem(f"--to {text}: expected STEP, STEP@LAUNCH or a path, such as 30500 or 30500@8")
    of = found[2]
    if of is None or (of.isdigit() and len(of) < 8):
        return int(found[1]), None if of is None else int(of), None, None
    return int(found[1]), None, of, None


def _sets(texts: list[str] | tuple[str, ...]) -> dict[str, float | int]:
    values: dict[str, float | int] = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            values[name.strip()] = int(value)
        except ValueError:
            try:
                values[name.strip()] = float(value)
            except ValueError:
                raise UsageProblem(f"--set {text}: expected FIELD=NUMBER, such as last_epoch=30500") from None
    return values


def _write_plan(plan: Plan, path: Path) -> None:
    content: dict[str, Any] = plan.to_json() | {"digest": plan.digest}
    temporary = path.with_name(f".{path.name}.part")
    temporary.unlink(missing_ok=True)
    REAL_DISK.write_new(temporary, jsonlib.dumps(content, indent=1, default=float).encode() + b"\n")
    REAL_DISK.replace(temporary, path)

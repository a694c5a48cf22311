"""`chronicle rollback` and `chronicle apply`: go back to a checkpoint, directly or from a written plan.

`apply` uses only the request of the written file. The plan is made again from the disk and applied if both plans do the
same. So an outdated plan is refused, and a forged one can do nothing that a request cannot.
"""

import json as jsonlib
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from chronicle.cli.completion import complete_steps
from chronicle.cli.options import (
    CheckpointsOption,
    CommandResult,
    ForceOption,
    JsonOption,
    LogsOption,
    RunOption,
    YesOption,
    settings_from,
    settings_with_checkpoints,
)
from chronicle.cli.planning import make_plan
from chronicle.cli.transaction import apply_and_report, open_run
from chronicle.cli.verify import read_every_byte
from chronicle.errors import ChronicleError, UsageProblem
from chronicle.journal import Entry, read_journal
from chronicle.journal.events import RECEIPTS, EntryKind, RollbackReceipt
from chronicle.paths import RunPaths
from chronicle.settings import Settings
from rollback.disk.durable import write_atomic
from rollback.disk.reading import read_bounded
from rollback.errors import PlanRefused
from rollback.plan.plan import COMMENTS, VERSION, Plan, format_plan, plan_digest
from rollback.plan.request import RollbackRequest

__all__ = [
    "apply_written_plan",
    "rollback",
]

TARGET = re.compile(r"(\d+)(?:@(\w+))?")


def rollback(
    to: Annotated[
        str,
        typer.Option(
            "--to",
            help="Step to go back to. STEP@LAUNCH or a path selects one of several.",
            metavar="N",
            autocompletion=complete_steps,
        ),
    ],
    lr_scale: Annotated[
        float | None, typer.Option("--lr-scale", help="Multiply every LR by this factor.", metavar="F")
    ] = None,
    lr: Annotated[float | None, typer.Option("--lr", help="Set the LR to this value.", metavar="X")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Set one field (repeatable).", metavar="FIELD=VALUE")
    ] = None,
    keep_later: Annotated[bool, typer.Option("--keep-later", help="Do not move later checkpoints.")] = False,
    warmup: Annotated[int, typer.Option("--warmup", help="Warm up the LR again over N steps.", metavar="N")] = 0,
    skip_batches: Annotated[int, typer.Option("--skip-batches", help="Skip the data of N steps.", metavar="N")] = 0,
    reshuffle: Annotated[bool, typer.Option("--reshuffle", help="Read the data in another order.")] = False,
    accept_change: Annotated[
        list[str] | None,
        typer.Option("--accept-change", help="Difference that the guard accepts, as `name: reason` (repeatable)."),
    ] = None,
    verify: Annotated[
        str,
        typer.Option(
            "--verify",
            help="`full` reads every byte; `quick` does not; `auto` does unless `chronicle verify` did since the last change.",
            metavar="HOW",
        ),
    ] = "auto",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan, change nothing.")] = False,
    plan_out: Annotated[Path | None, typer.Option("--plan-out", help="Write the plan for `chronicle apply`.")] = None,
    deepspeed_config: Annotated[
        Path | None,
        typer.Option(
            "--deepspeed-config", help="DeepSpeed config of the next launch; its LRs are edited too.", metavar="FILE"
        ),
    ] = None,
    force: ForceOption = None,
    yes: YesOption = False,
    run: RunOption = None,
    logs: LogsOption = None,
    checkpoints: CheckpointsOption = None,
    json: JsonOption = False,
) -> CommandResult:
    """Go back to a checkpoint, and change its LR if asked.

    The LR is scaled in every file that holds it, later checkpoints are moved to `abandoned/`, and pointers are
    updated: all of it or nothing. The plan is shown first, and `chronicle undo` restores every byte.

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
    # Without a terminal and without --yes, nothing is created either: the plan is shown and not applied.
    looking = only_look or (not yes and not sys.stdin.isatty())
    with open_run(settings, force=force, writing=not looking) as opened:
        settings.need_checkpoints()  # an interrupted transaction, which may have renamed the root, is reported first
        plan = make_plan(request, opened, abandoned_by=abandoned_by, path=path, verify=verify, read=read_every_byte)
        if plan_out is not None:
            _write_plan(plan, plan_out)
        if only_look:
            return _shown(plan, plan_out)
        return apply_and_report(plan, opened, yes=yes)


def _shown(plan: Plan, written: Path | None) -> CommandResult:
    talk = (
        "nothing was changed" if written is None else f"plan written to {written}; apply it with `chronicle apply`"
    )
    return CommandResult(text=format_plan(plan), data=plan.to_json() | {"digest": plan.digest}, talk=(talk,))


def _target(text: str) -> tuple[int, int | None, str | None, Path | None]:
    """(step, launch, rollback id, path) of `30500`, `30500@8`, `30500@` with the end of a rollback's id, or a path."""
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
    write_atomic(path, jsonlib.dumps(content, indent=1, default=float) + "\n")


# --- chronicle apply

MAX_PLAN_BYTES = 256 * 2**20  # a plan for 512 ranks with a hundred groups each has about 50 MB


def apply_written_plan(
    file: Annotated[Path, typer.Argument(help="File with the plan.", metavar="FILE")],
    force: ForceOption = None,
    yes: YesOption = False,
    run: RunOption = None,
    logs: LogsOption = None,
    checkpoints: CheckpointsOption = None,
    json: JsonOption = False,
) -> CommandResult:
    """Apply a plan that `chronicle rollback --plan-out` wrote.

    Refused when something that the plan was made from has changed since. A plan that is already applied is not
    applied again.

    Example: chronicle apply plan.json --yes
    """
    written = _read_plan(file)
    settings = _settings(written, run, logs, checkpoints)
    done = _last_change(settings.paths)
    if done is not None and done.kind == EntryKind.ROLLBACK_RECEIPT and RollbackReceipt.of(done).plan == plan_digest(written):
        return CommandResult(text=f"already applied ({done.id}): nothing to do", data={"receipt": done.id})
    with open_run(settings, force=force, writing=yes or sys.stdin.isatty()) as opened:
        if str(opened.root) != written["root"] or settings.run != written["run"]:
            raise PlanRefused(
                f"this is run `{settings.run}` in `{opened.root}`: the plan is for run `{written['run']}` "
                f"in `{written['root']}`",
                "plan again here",
            )
        settings.need_checkpoints()
        request = RollbackRequest.from_json(written["request"])
        plan = make_plan(request, opened, path=Path(written["source"]), read=read_every_byte)
        _refuse_other_plan(plan, written, file)
        return apply_and_report(plan, opened, yes=yes)


def _refuse_other_plan(plan: Plan, written: Mapping[str, Any], file: Path) -> None:
    """Raise `PlanRefused` when a plan made from the disk now differs from the written one."""
    if plan.digest == plan_digest(written):
        return
    fresh = jsonlib.loads(jsonlib.dumps(plan.to_json(), default=float))
    other = [name for name in fresh if name not in COMMENTS and fresh[name] != written.get(name)]
    detail = ""
    if "inputs" in other:
        recorded = written.get("inputs")
        known = {str(item) for item in recorded} if isinstance(recorded, list) else set()
        changed = [item["path"] for item in fresh["inputs"] if str(item) not in known]
        detail = f" (`{changed[0]}` changed)" if changed else ""
    raise PlanRefused(
        f"`{file}` does not match the checkpoints: {', '.join(other) or 'something'} changed since it was written, on disk "
        f"or in the file{detail}",
        "plan again with `chronicle rollback --plan-out`",
    )


def _settings(written: Mapping[str, Any], run: str | None, logs: Path | None, checkpoints: Path | None) -> Settings:
    settings = settings_from(run or written["run"], logs, checkpoints or Path(written["root"]))
    edits = written.get("config_edits")
    if isinstance(edits, list) and edits and isinstance(edits[0], list) and edits[0] and _is_text(edits[0][0]):
        settings = replace(
            settings,
            deepspeed_config=Path(edits[0][0]),
            origin={**settings.origin, "deepspeed_config": "the plan"},
        )
    return settings


def _last_change(paths: RunPaths) -> Entry | None:
    """The newest entry that changed checkpoints."""
    changes = list(read_journal(paths).of_kind(*RECEIPTS))
    return changes[-1] if changes else None


def _read_plan(path: Path) -> dict[str, Any]:
    """The written plan as JSON, with the types of the fields that are used checked."""
    try:
        record = jsonlib.loads(read_bounded(path, MAX_PLAN_BYTES))
    except OSError as problem:
        raise ChronicleError(f"cannot read the plan `{path}`: {problem.strerror}") from problem
    except (ValueError, RecursionError) as problem:
        raise ChronicleError(f"`{path}` is not a plan: {problem}") from problem
    texts = ("run", "root", "source")
    if not isinstance(record, dict) or not all(_is_text(record.get(name)) for name in texts):
        raise ChronicleError(f"`{path}` is not a plan: expected an object with {', '.join(texts)} and request")
    if record.get("v") != VERSION:
        raise PlanRefused(f"plan has version {record.get('v')!r}: expected version {VERSION}")
    if not isinstance(record.get("request"), dict):
        raise ChronicleError(f"`{path}` is not a plan: its request is not an object")
    if record.pop("digest", None) != plan_digest(record):
        raise PlanRefused(f"`{path}` was changed since it was written: its digest does not match", "plan again")
    return record


def _is_text(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value

"""`chronicle rollback` and `chronicle apply`: go back to a checkpoint, at once or from a written plan.

`apply` uses only the request of the written file. The plan is made again from the disk and applied when both plans do
the same; so an outdated plan is refused, and a forged one can do nothing that a request cannot.
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
    JsonOption,
    LogsOption,
    RunOption,
    YesOption,
    settings_from,
    settings_with_checkpoints,
)
from chronicle.cli.planning import make_plan
from chronicle.cli.transaction import carry_out, open_ground
from chronicle.cli.verify import read_every_byte
from chronicle.errors import ChronicleError, UsageProblem
from chronicle.journal import Entry, read_journal
from chronicle.paths import RunPaths
from chronicle.settings import Settings
from rollback.disk.durable import write_atomic
from rollback.disk.reading import read_bounded
from rollback.errors import PlanRefused
from rollback.plan.plan import VERSION, WORDS, Plan, plan_digest
from rollback.plan.request import RollbackRequest
from rollback.plan.text import format_plan

__all__ = [
    "apply",
    "rollback",
]

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
    write_atomic(path, jsonlib.dumps(content, indent=1, default=float) + "\n")


# --- chronicle apply

MAX_PLAN_BYTES = 256 * 2**20  # 512 ranks of a hundred groups each make some 50 MB


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
    written = _read_plan(file)
    settings = _settings(written, run, logs, checkpoints)
    done = _last_change(settings.paths)
    if done is not None and done.kind == "rollback.receipt" and done.data.get("plan") == plan_digest(written):
        return CommandResult(text=f"already carried out ({done.id}): nothing to do", data={"receipt": done.id})
    with open_ground(settings, force=force, writing=yes or sys.stdin.isatty()) as ground:
        if str(ground.root) != written["root"] or settings.run != written["run"]:
            raise PlanRefused(
                f"the plan is for run `{written['run']}` in `{written['root']}`, this is run `{settings.run}` "
                f"in `{ground.root}`",
                "plan again here",
            )
        settings.need_checkpoints()
        request = RollbackRequest.from_json(written["request"])
        plan = make_plan(request, ground, path=Path(written["source"]), read=read_every_byte)
        _refuse_other_deeds(plan, written, file)
        return carry_out(plan, ground, yes=yes)


def _refuse_other_deeds(plan: Plan, written: Mapping[str, Any], file: Path) -> None:
    """Raise `PlanRefused` when the plan that fits what lies on disk is not the one that was written down."""
    if plan.digest == plan_digest(written):
        return
    fresh = jsonlib.loads(jsonlib.dumps(plan.to_json(), default=float))
    other = [name for name in fresh if name not in WORDS and fresh[name] != written.get(name)]
    detail = ""
    if "inputs" in other:
        recorded = written.get("inputs")
        known = {str(item) for item in recorded} if isinstance(recorded, list) else set()
        changed = [item["path"] for item in fresh["inputs"] if str(item) not in known]
        detail = f" (`{changed[0]}` changed)" if changed else ""
    raise PlanRefused(
        f"`{file}` is not the plan that fits what lies there now: since it was written, "
        f"{', '.join(other) or 'something'} changed, there or in the file{detail}",
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
    changes = list(read_journal(paths).of_kind("rollback.receipt", "undo.receipt", "recover.receipt"))
    return changes[-1] if changes else None


def _read_plan(path: Path) -> dict[str, Any]:
    """The written plan as JSON; what is used of it has the right types."""
    try:
        record = jsonlib.loads(read_bounded(path, MAX_PLAN_BYTES))
    except OSError as problem:
        raise ChronicleError(f"cannot read the plan `{path}`: {problem.strerror}") from problem
    except (ValueError, RecursionError) as problem:
        raise ChronicleError(f"`{path}` is no plan: {problem}") from problem
    texts = ("run", "root", "source")
    if not isinstance(record, dict) or not all(_is_text(record.get(name)) for name in texts):
        raise ChronicleError(f"`{path}` is no plan: expected an object with {', '.join(texts)} and request")
    if record.get("v") != VERSION:
        raise PlanRefused(f"plan has version {record.get('v')!r}: this program carries out version {VERSION}")
    if not isinstance(record.get("request"), dict):
        raise ChronicleError(f"`{path}` is no plan: its request is no object")
    if record.pop("digest", None) != plan_digest(record):
        raise PlanRefused(f"`{path}` was changed after it was planned: its digest is another", "plan again")
    return record


def _is_text(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value

"""`chronicle rollback`: makes the plan, shows it, asks, and applies it. How a plan is made is in `chronicle.goback`."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from chronicle import goback
from chronicle.cli.completion import complete_steps
from chronicle.cli.options import CHANGING, Changing, CommandResult, settings_from
from chronicle.cli.transaction import agree, byte_progress
from chronicle.errors import UsageProblem
from chronicle.goback.applying import plan_store
from chronicle.journal import read_journal
from rollback.plan.plan import Plan, format_plan
from rollback.plan.request import RollbackRequest

if TYPE_CHECKING:
    from rollback.transaction.in_store import StorePlan


def rollback(
    to: Annotated[
        str | None,
        Option(
            "--to",
            help="Step to go back to. STEP@LAUNCH or a path selects one of several. Without it the open proposal is named.",
            metavar="N",
            autocompletion=complete_steps,
        ),
    ] = None,
    lr_scale: float | None = None,
    lr: float | None = None,
    warmup: int = 0,
    skip_batches: int = 0,
    reshuffle: bool = False,
    dry_run: bool = False,
    plan_in: Path | None = None,
    plan_out: Path | None = None,
    set_: list[str] | None = None,
    keep_later: bool = False,
    accept_change: list[str] | None = None,
    accept_unproved: str = "",
    verify: str = "auto",
    deepspeed_config: Path | None = None,
    lr_in: list[str] | None = None,
    at: Changing = CHANGING,
) -> CommandResult:
    """Go back to a checkpoint, and change its LR if asked.

    The LR is scaled in every file that holds it, later checkpoints are moved to `abandoned/`, and pointers are
    updated: all of it or nothing. The plan is shown first, and `chronicle undo` restores every byte.

    Example: chronicle rollback --to 30500 --lr-scale 0.5

    The checkpoint of another launch: chronicle rollback --to 30500@8 --dry-run

    Options:
      --lr-scale F: Multiply every LR by this factor.
      --lr X: Set the LR to this value.
      --warmup N: Warm up the LR again over N steps.
      --skip-batches N: Skip the data of N steps.
      --reshuffle: Read the data in another order.
      --dry-run: Show the plan, change nothing.
      --plan FILE: Apply the plan that --plan-out wrote; refused when what it was made from has changed.

    Rare options:
      --plan-out: Write the plan into a file.
      --set FIELD=VALUE: Set one field, such as last_epoch, weight_decay or beta2 (repeatable).
      --keep-later: Do not move later checkpoints.
      --accept-change: Difference that the guard accepts, as `name: reason` (repeatable).
      --accept-unproved REASON: Edit the LR although something else may set it in the next launch; the reason is recorded.
      --verify HOW: `full` reads every byte, `quick` does not; `auto` skips what `chronicle verify` read since the last
          change.
      --deepspeed-config FILE: DeepSpeed config of the next launch; its LRs are edited too.
      --lr-in FILE:KEY: Number in a config from which the next launch takes its LR; it is edited too (repeatable).
    """
    if plan_in is not None:
        asked = [to, lr_scale, lr, set_, plan_out, deepspeed_config, lr_in, accept_change]
        switches = (keep_later, warmup, skip_batches, reshuffle, accept_unproved, dry_run)
        if any(one is not None for one in asked) or any(switches):
            raise UsageProblem("--plan takes no other changes: the file already says what is done")
        return _apply_written(plan_in, at)
    if verify not in ("auto", "quick", "full"):
        raise UsageProblem(f"--verify {verify}: expected auto, quick or full")
    if to is None:
        raise _without_target(at)
    target = goback.Target.parse(to)
    request = RollbackRequest(
        step=target.step,
        launch=target.launch,
        lr_scale=lr_scale,
        lr=lr,
        sets=_sets(set_ or ()),
        keep_later=keep_later,
        warmup_steps=warmup,
        skip_batches=skip_batches,
        reshuffle=reshuffle,
        accept_change=tuple(accept_change or ()),
        accept_unproved=accept_unproved.strip(),
        lr_in=tuple(_absolute_place(text) for text in lr_in or ()),
    )
    settings = at.settings()
    in_store = settings.checkpoints_url is not None
    if in_store and plan_out is not None:
        raise UsageProblem("--plan-out: a plan in a store holds until its objects change, and is not applied from a file")
    if deepspeed_config is not None:
        origin = {**settings.origin, "deepspeed_config": "flag"}
        settings = replace(settings, deepspeed_config=deepspeed_config.absolute(), origin=origin)
    only_look = dry_run or plan_out is not None
    nobody_agrees = not at.yes and not sys.stdin.isatty()  # then nothing is created either
    with goback.open_run(settings, force=at.force, writing=not only_look and not nobody_agrees) as opened:
        if not in_store:
            settings.need_checkpoints()  # an interrupted transaction, which may have renamed the root, is reported first
        plan = goback.plan(request, opened, target, verify=verify, progress=byte_progress)
        done = "nothing was changed"
        if plan_out is not None:
            from chronicle.goback.written import write_plan  # only where a plan is written

            write_plan(plan, plan_out)
            done = f"plan written to {plan_out}; apply it with `chronicle rollback --plan`"
        if only_look or (in_store and nobody_agrees):
            text, data, _ = _told(plan, opened)
            return CommandResult(lines=text, data=data, talk=(done,))
        return _apply(plan, opened, yes=at.yes)


def _apply_written(file: Path, at: Changing) -> CommandResult:
    """Apply a plan that `--plan-out` wrote; one that is already applied is not applied again."""
    from chronicle.goback import written  # only where a plan is read from a file

    record = written.read_plan(file)
    root = at.checkpoints or Path(record["root"])
    settings = written.with_config(settings_from(at.run or record["run"], at.logs, root), record)
    done = written.find_applied(record, settings.paths, at.force)
    if done is not None:
        return CommandResult(lines=f"already applied ({done.id}): nothing to do", data={"receipt": done.id})
    with goback.open_run(settings, force=at.force, writing=at.yes or sys.stdin.isatty()) as opened:
        plan = written.plan_again(record, opened, file, byte_progress)
        return _apply(plan, opened, yes=at.yes)


def _without_target(at: Changing) -> UsageProblem:
    """No step was named: the open proposal's command is what to type, where there is one."""
    from chronicle.story.matters import open_proposal

    paths = settings_from(at.run, at.logs, at.checkpoints).paths
    proposal = open_proposal(read_journal(paths).entries)
    if proposal is None or not proposal.command:
        hint = "name the step, as in `chronicle rollback --to 30500`; `chronicle watch --once` looks for a checkpoint"
        return UsageProblem("no step to go back to: --to is missing, and no proposal is open", hint)
    text = f"no step to go back to: --to is missing; the open proposal names step {proposal.target_step}"
    return UsageProblem(text, f"to take it: `{proposal.command}`")


def _sets(texts: Sequence[str]) -> dict[str, float | int]:
    values: dict[str, float | int] = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            number = float(value)
        except ValueError:
            raise UsageProblem(f"--set {text}: expected FIELD=NUMBER, such as last_epoch=30500") from None
        is_whole = value.strip().lstrip("+-").isdecimal()
        values[name.strip()] = int(value) if is_whole else number
    return values


def _absolute_place(text: str) -> str:
    path, colon, field = text.rpartition(":")
    if not (path and field):
        raise UsageProblem(f"--lr-in {text}: expected FILE:key.path, such as train.yaml:optimizer.lr")
    return f"{Path(path).absolute()}{colon}{field}"


def _apply(plan: Plan, opened: goback.OpenedRun, *, yes: bool) -> CommandResult:
    """Show the plan, ask on a terminal, apply it. Raises `UsageProblem` before any change when nobody can be asked."""
    text, data, change = _told(plan, opened)
    if change is None:
        is_done = not plan.changes_anything
        done = f"the next launch will load step {plan.step}"
        if not goback.has_guard(plan, opened.journal):  # nothing compares what the next launch loads
            done = f"step {plan.step} is ready for the next launch"
    else:
        is_done = not change.objects and change.before == change.after
        done = f"the next launch will load step {plan.step} from {change.target}"
    if is_done:
        return CommandResult(lines=f"already at step {plan.step}: nothing to change", data=data | {"changed": False})
    agree("Apply this plan?", text, yes=yes)
    receipt = goback.apply(plan, opened, change)
    talk = [f"new journal: {opened.paths.journal_dir}"] if opened.is_new else []
    talk += [receipt.left_over] if receipt.left_over else []
    made = {"changed": True, "receipt": receipt.id}
    data = made | {"plan": data} if change is None else data | made
    return CommandResult(
        lines=f"{text}\n\ndone: {done} ({receipt.id})", data=data, talk=(*talk, "undo it with `chronicle undo`")
    )


def _told(plan: Plan, opened: goback.OpenedRun) -> tuple[str, dict[str, Any], "StorePlan | None"]:
    """A plan as text and as JSON, and what it becomes in an object store."""
    guarded = goback.has_guard(plan, opened.journal)
    if opened.bucket is None:
        data = plan.to_json() | {"digest": plan.digest, "guarded": guarded}
        return format_plan(plan, guarded=guarded), data, None
    change = plan_store(plan, opened)
    told = replace(change.plan, notes=(*plan.notes, *change.lines()))
    text = format_plan(told, guarded=guarded).rpartition("\n")[0]  # without a digest: the new prefix is new each time
    return text, told.to_json() | {"store": change.to_json(), "guarded": guarded}, change

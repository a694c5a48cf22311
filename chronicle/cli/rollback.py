"""`chronicle rollback`: finds and verifies the checkpoint, shows the plan, asks, applies, and records it.

Below the command is how a plan is made from what is on disk; `chronicle rollback --plan` makes its plan in the same way.
"""

import json as jsonlib
import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer

from chronicle.checkpoints import CheckpointVerdict, find_verdict, launch_evidence, with_launches
from chronicle.cli.completion import complete_steps
from chronicle.cli.options import (
    CheckpointsOption,
    CommandResult,
    ForceOption,
    JsonOption,
    LogsOption,
    RunOption,
    YesOption,
    name_twins,
    settings_from,
    settings_with_checkpoints,
)
from chronicle.cli.transaction import OpenedRun, apply_and_report, has_guard, open_run, read_every_byte
from chronicle.errors import UsageProblem
from chronicle.journal import Entry, compute_lineage
from chronicle.journal.events import (
    GUARDED_SAVES,
    CheckpointSaved,
    LaunchEnd,
    LaunchStart,
    Searched,
    StateSaved,
    events_of,
)
from chronicle.journal.events import read as read_event
from chronicle.metrics.log import logged_pace
from chronicle.settings import Settings, is_url
from rollback.checkpoint.layout import Checkpoint
from rollback.checkpoint.listing import (
    list_checkpoints,
    read_state,
    refuse_strays,
    select_checkpoint,
)
from rollback.checkpoint.manifest import read_manifest
from rollback.checkpoint.state import CheckpointState
from rollback.checks.verify import FATAL, check_names, refuse_unusable, verify_and_read
from rollback.disk.durable import write_atomic
from rollback.errors import AmbiguousStep, CheckpointNotFound, Finding, Incomplete, PlanRefused, Severity
from rollback.files.config_text import ConfigFile, NotPlainConfig
from rollback.lr.authority import Evidence
from rollback.plan.plan import Plan, format_plan
from rollback.plan.request import HONOURED, Cost, RollbackRequest
from rollback.transaction.apply import plan_from_disk

__all__ = [
    "apply_written_plan",
    "make_plan",
    "rollback",
]

TARGET = re.compile(r"(\d+)(?:@(\w+))?")


def rollback(
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            help="Step to go back to. STEP@LAUNCH or a path selects one of several. Without it the open proposal is named.",
            metavar="N",
            autocompletion=complete_steps,
        ),
    ] = None,
    lr_scale: Annotated[
        float | None, typer.Option("--lr-scale", help="Multiply every LR by this factor.", metavar="F")
    ] = None,
    lr: Annotated[float | None, typer.Option("--lr", help="Set the LR to this value.", metavar="X")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Set one field, such as last_epoch or beta2 (repeatable).", metavar="FIELD=VALUE"),
    ] = None,
    keep_later: Annotated[bool, typer.Option("--keep-later", help="Do not move later checkpoints.")] = False,
    warmup: Annotated[int, typer.Option("--warmup", help="Warm up the LR again over N steps.", metavar="N")] = 0,
    skip_batches: Annotated[int, typer.Option("--skip-batches", help="Skip the data of N steps.", metavar="N")] = 0,
    reshuffle: Annotated[bool, typer.Option("--reshuffle", help="Read the data in another order.")] = False,
    accept_change: Annotated[
        list[str] | None,
        typer.Option("--accept-change", help="Difference that the guard accepts, as `name: reason` (repeatable)."),
    ] = None,
    accept_unproved: Annotated[
        str,
        typer.Option(
            "--accept-unproved",
            help="Edit the LR although something else may set it in the next launch; the reason is recorded.",
            metavar="REASON",
        ),
    ] = "",
    verify: Annotated[
        str,
        typer.Option(
            "--verify",
            help="`full` reads every byte, `quick` does not; `auto` skips what `chronicle verify` read since the last change.",
            metavar="HOW",
        ),
    ] = "auto",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan, change nothing.")] = False,
    plan_out: Annotated[Path | None, typer.Option("--plan-out", help="Write the plan into a file.")] = None,
    plan_in: Annotated[
        Path | None,
        typer.Option(
            "--plan",
            help="Apply the plan that --plan-out wrote; refused when what it was made from has changed.", metavar="FILE",
        ),
    ] = None,
    deepspeed_config: Annotated[
        Path | None,
        typer.Option(
            "--deepspeed-config", help="DeepSpeed config of the next launch; its LRs are edited too.", metavar="FILE"
        ),
    ] = None,
    lr_in: Annotated[
        list[str] | None,
        typer.Option(
            "--lr-in", help="Number in a config from which the next launch takes its LR; it is edited too (repeatable).",
            metavar="FILE:KEY",
        ),
    ] = None,
    try_: Annotated[
        int | None,
        typer.Option(
            "--try", metavar="N",
            help="Try N ways first, as short launches in a sandbox, and rank them; nothing is changed [--to: as proposed].",
        ),
    ] = None,
    try_steps: Annotated[
        int, typer.Option("--try-steps", help="How many steps each goes on beyond where the run came.", metavar="N")
    ] = 100,
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

    Before a proposal is taken: chronicle rollback --try 3
    """
    if plan_in is not None:
        asked = [to, lr_scale, lr, set_, plan_out, deepspeed_config, lr_in, accept_change]
        switches = (keep_later, warmup, skip_batches, reshuffle, accept_unproved, dry_run)
        if any(one is not None for one in asked) or any(switches):
            raise UsageProblem("--plan with other changes: the file already says what is done")
        return apply_written_plan(plan_in, force, yes, run, logs, checkpoints, json)
    if to is None and try_ is not None:
        proposed = _as_proposed(settings_from(run, logs, checkpoints))
        to = proposed[0]
        if not (lr_scale or lr or skip_batches or reshuffle or set_):  # who names a change means this one, at the proposed step
            _, lr_scale, lr, skip_batches, reshuffle = proposed
    if to is None:
        raise _without_target(settings_from(run, logs, checkpoints))
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
        accept_unproved=accept_unproved.strip(),
        lr_in=tuple(_absolute_place(text) for text in lr_in or ()),
    )
    settings = settings_with_checkpoints(run, logs, checkpoints)
    if try_ is not None:
        from chronicle.cli.replay import show_tries  # only where ways are tried

        return show_tries(settings, request, count=try_, steps=try_steps)
    if settings.checkpoints_url is not None:
        return _in_store(request, settings, dry_run, plan_out, yes=yes, force=force, path=path, verify=verify)
    if deepspeed_config is not None:
        origin = {**settings.origin, "deepspeed_config": "flag"}
        settings = replace(settings, deepspeed_config=deepspeed_config.absolute(), origin=origin)
    only_look = dry_run or plan_out is not None
    # Without a terminal and without --yes, nothing is created either: the plan is shown and not applied.
    looking = only_look or (not yes and not sys.stdin.isatty())
    with open_run(settings, force=force, writing=not looking) as opened:
        settings.need_checkpoints()  # an interrupted transaction, which may have renamed the root, is reported first
        plan = make_plan(request, opened, abandoned_by=abandoned_by, path=path, verify=verify)
        if plan_out is not None:
            _write_plan(plan, plan_out)
        if only_look:
            return _shown(plan, plan_out, guarded=has_guard(plan, opened.journal))
        return apply_and_report(plan, opened, yes=yes)


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
    applied again. Today: `chronicle rollback --plan FILE`.

    Example: chronicle apply plan.json --yes
    """
    from chronicle.cli.apply import apply_file  # only where a plan is read from a file

    return apply_file(file, make_plan, force=force, yes=yes, run=run, logs=logs, checkpoints=checkpoints)


def _as_proposed(settings: Settings) -> tuple[str | None, float | None, float | None, int, bool]:
    """What the open proposal's command asks for: --to, --lr-scale, --lr, --skip-batches, --reshuffle."""
    from chronicle.journal.reader import read_journal
    from chronicle.story.matters import open_proposal

    proposal = open_proposal(read_journal(settings.paths).entries) if settings.paths.journal_dir.is_dir() else None
    words = shlex.split(proposal.command) if proposal is not None else []
    given = {name: value for name, value in pairwise(words) if name.startswith("--")}
    scale, lr = given.get("--lr-scale"), given.get("--lr")
    return (given.get("--to"), None if scale is None else float(scale), None if lr is None else float(lr),
            int(given.get("--skip-batches", 0)), "--reshuffle" in words)  # fmt: skip


def _without_target(settings: Settings) -> UsageProblem:
    """No step was named: the open proposal's command is what to type, where there is one."""
    from chronicle.journal.reader import read_journal
    from chronicle.story.matters import open_proposal

    proposal = open_proposal(read_journal(settings.paths).entries) if settings.paths.journal_dir.is_dir() else None
    if proposal is None or not proposal.command:
        hint = "name the step, as in `chronicle rollback --to 30500`; `chronicle spikes` looks for a checkpoint"
        return UsageProblem("no step to go back to: --to is missing, and no proposal is open", hint)
    text = f"no step to go back to: --to is missing; the open proposal names step {proposal.target_step}"
    return UsageProblem(text, f"to take it: `{proposal.command}`")


def _in_store(
    request: RollbackRequest, settings: Settings, dry_run: bool, plan_out: Path | None, *, yes: bool, force: str | None,
    path: Path | None, verify: str,
) -> CommandResult:  # fmt: skip
    from chronicle.cli.in_store import rollback_store  # only where the checkpoints are in a store

    if plan_out is not None:
        raise UsageProblem("--plan-out: a plan in a store holds until its objects change, and is not applied from a file")
    look = dry_run or (not yes and not sys.stdin.isatty())
    return rollback_store(request, settings, make_plan, force=force, path=path, verify=verify, look=look, yes=yes)


def _shown(plan: Plan, written: Path | None, *, guarded: bool) -> CommandResult:
    talk = (
        "nothing was changed" if written is None else f"plan written to {written}; apply it with `chronicle rollback --plan`"
    )
    data = plan.to_json() | {"digest": plan.digest, "guarded": guarded}
    return CommandResult(text=format_plan(plan, guarded=guarded), data=data, talk=(talk,))


def _target(text: str) -> tuple[int, int | None, str | None, Path | None]:
    """(step, launch, rollback id, path) of `30500`, `30500@8`, `30500@` with the end of a rollback's id, or a path."""
    found = TARGET.fullmatch(text.strip())
    if found is None and (os.path.lexists(text) or is_url(text)):
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


# --- The plan: find the checkpoint, refuse an unusable one, read and verify it

def make_plan(
    request: RollbackRequest,
    opened: OpenedRun,
    *,
    abandoned_by: str | None = None,
    path: Path | None = None,
    verify: str = "auto",
) -> Plan:
    """Plan `request` from what is on disk now.

    `abandoned_by` picks among checkpoints of one step by the rollback that moved it away; `path` names the checkpoint,
    and the request's step is taken from it. `verify` is "full" (every byte is read), "quick", or "auto": full unless
    the journal holds the verdict of a full `chronicle verify` and no file has changed since.
    Raises `CheckpointNotFound`, `AmbiguousStep`, `StrayFiles`, `Incomplete` or `PlanRefused`; nothing
    is changed.
    """
    entries = opened.journal.entries
    listed = with_launches(list_checkpoints(opened.root), entries)
    found = [c for c in listed if not c.path.is_symlink()]  # a link to a checkpoint is a pointer
    _refuse_link(listed, found, request.step)
    chosen = _select(found, request, abandoned_by, Path(opened.root)) if path is None else _at(found, path)
    if chosen.path == Path(os.path.abspath(opened.root)):
        raise PlanRefused(
            f"`{opened.root}` is a checkpoint itself: a rollback exchanges checkpoints inside a directory",
            remedy=f"name the directory that holds it, and nothing of another run: --checkpoints {chosen.path.parent}",
        )
    request = request if chosen.step is None else replace(request, step=chosen.step)
    refuse_strays(chosen)
    refuse_unusable(chosen, check_names(chosen))
    verdict = find_verdict(chosen.path, entries)
    _refuse_found_unsound(chosen, verdict)
    full = verify == "full" or (verify == "auto" and not (verdict and verdict.sound))
    verified = read_every_byte(chosen) if full else verify_and_read(chosen)
    findings = verified.findings
    refuse_unusable(chosen, findings)
    state = verified.state or read_state(chosen)  # read again to raise the error
    manifest = None if chosen.single_file else read_manifest(chosen.path)
    return plan_from_disk(
        request,
        chosen,
        found,
        state,
        manifest,
        root=opened.root,
        run=opened.settings.run,
        honours=_honoured(chosen, None if manifest is None else manifest.memory, entries),
        config=find_deepspeed_config(opened.settings, entries, state),
        evidence=_evidence(request, chosen, entries),
        cost=_cost(request.step, opened),
        remarks=(*_remarks(findings, full, verdict), *name_twins(chosen), *_tried(request.step, entries)),
    )


def _refuse_link(listed: Sequence[Checkpoint], found: Sequence[Checkpoint], step: int | None) -> None:
    """Raise `CheckpointNotFound` for a step that exists only as a symbolic link."""
    links = [c.path for c in listed if c.step == step and c not in found]
    if links and step not in {c.step for c in found}:
        raise CheckpointNotFound(
            f"step {step} exists only as `{links[0]}`, a symbolic link to `{os.readlink(links[0])}`: expected the checkpoint "
            "itself in this directory, because a rollback moves it",
            remedy="move the checkpoint to the place of the link, or name its own directory with --checkpoints",
        )


def _select(found: Sequence[Checkpoint], request: RollbackRequest, abandoned_by: str | None, root: Path) -> Checkpoint:
    if abandoned_by is None:
        return select_checkpoint(found, request.step, request.launch, root)
    hits = [c for c in found if c.step == request.step and (c.abandoned or "").endswith(abandoned_by.upper())]
    if len(hits) == 1:
        return hits[0]
    if hits:
        raise AmbiguousStep(
            f"step {request.step} was abandoned by several rollbacks ending in `{abandoned_by}`",
            "use more characters of the id",
        )
    raise CheckpointNotFound(
        f"no checkpoint of step {request.step} abandoned by a rollback `{abandoned_by}`",
        remedy="`chronicle log` lists the rollbacks",
    )


def _at(found: Sequence[Checkpoint], path: Path) -> Checkpoint:
    """The listed checkpoint at `path`, in the root or among the abandoned ones."""
    wanted = Path(os.path.abspath(path))
    hits = [c for c in found if c.path == wanted or c.path.resolve() == wanted.resolve()]
    if not hits:
        names = ", ".join(c.path.name for c in found[:8]) or "none"
        raise CheckpointNotFound(f"`{path}` is not a checkpoint of this run: expected one of {names}")
    if hits[0].step is None:
        raise CheckpointNotFound(
            f"the step of `{path}` is unknown: expected it in the name or in the counters",
            remedy="`chronicle inspect` shows what it holds",
        )
    return hits[0]


def _refuse_found_unsound(checkpoint: Checkpoint, verdict: CheckpointVerdict | None) -> None:
    """Raise `Incomplete` when `chronicle verify` found a damaged file before, and no file has changed since."""
    fatal = [] if verdict is None else [error for error in verdict.errors if error[0] in FATAL]
    if verdict is not None and fatal:
        check, path, message = fatal[0]
        raise Incomplete(
            f"checkpoint `{checkpoint.path}`: `{path}`: {message} ({check}, found by `chronicle verify` on {verdict.when}; "
            "no file has changed since)",
            remedy="go back to another checkpoint; `chronicle verify` checks this one again",
        )


def _remarks(findings: Sequence[Finding], full: bool, verdict: CheckpointVerdict | None) -> tuple[str, ...]:
    shown = [f"{f.check} {f.path}: {f.message}" for f in findings if f.severity is not Severity.INFO]
    if full:
        depth = "every byte was read now"
    elif verdict is not None and verdict.sound:
        depth = f"every byte was read on {verdict.when}; no file has changed since"
    else:
        depth = "names, structure and counters only; `--verify full` reads every byte"
    return (*shown, f"verified: {depth}")


def _tried(step: int, entries: Sequence[Entry]) -> Iterator[str]:
    """What the last tries found that had this step among their ways."""
    tries = [row for row in events_of(entries, Searched) if row[1].axis == "rollback"]
    found = [row for row in tries if row[1].start == step or any(way.get("begin") == step for way in row[1].rows)]
    if found:
        entry, event = found[-1]
        yield f"tried on {entry.ts[:10]}: {event.answer}"


def _honoured(chosen: Checkpoint, memory: Mapping[str, object] | None, entries: Sequence[Entry]) -> frozenset[str]:
    """The options that the run supports at run time: `honours`, as declared when the checkpoint was saved.

    They are in the manifest; for a checkpoint that is a single file, in the journal entry of its save.
    """
    listed = None if memory is None else memory.get("honours")
    if chosen.single_file:
        saves = [read_event(e) for e in entries if e.kind in GUARDED_SAVES and e.step == chosen.step]
        events = [event for event in saves if isinstance(event, CheckpointSaved | StateSaved)]
        named = [e for e in events if Path(getattr(e, "path", None) or "").name == chosen.path.name]
        found = named or [event for event in events if isinstance(event, StateSaved)]
        listed = found[-1].honours if found else None
    return frozenset(map(str, listed)) & frozenset(HONOURED) if isinstance(listed, list) else frozenset()


def _cost(step: int, opened: OpenedRun) -> Cost:
    """Steps of the present lineage after the target, and hours where the per-step log gives the pace.

    Of a launch whose end nobody recorded (it was killed with its supervisor), the log says how far it came.
    """
    entries = opened.journal.entries
    lineage = compute_lineage(entries)
    head = max([lineage.head_step, *(e.step for e in entries if e.kind == CheckpointSaved.KIND and e.step is not None)])
    started = max((entry.launch or 0 for entry, _ in events_of(entries, LaunchStart)), default=0)
    ended = {entry.launch for entry, _ in events_of(entries, LaunchEnd)}
    unended = started if started and started not in ended else None
    last, pace = logged_pace(opened.paths, unended or lineage.head_launch)
    head = max(head, last or 0) if unended else head
    if head <= step:
        return Cost()
    return Cost(steps=head - step, hours=None if pace is None else round((head - step) * pace / 3600, 2))


# --- The DeepSpeed config of the next launch

# of deepspeed.add_config_arguments, transformers' TrainingArguments, `accelerate launch`, and common scripts
OPTIONS = ("--deepspeed_config", "--deepspeed-config", "--deepspeed", "--deepspeed_config_file", "--ds_config", "--ds-config")


def find_deepspeed_config(settings: Settings, entries: Sequence[Entry], state: CheckpointState) -> ConfigFile | None:
    """The config of the next launch where the scheduler is DeepSpeed's own; None where no config is named.

    Raises `UsageProblem` when the config that the user named cannot be read.
    """
    if not any("last_batch_iteration" in scheduler.state for scheduler in state.schedulers):  # else it is not asked
        return None
    if settings.deepspeed_config is not None:
        origin = settings.origin.get("deepspeed_config", "default")
        named = "--deepspeed-config" if origin == "flag" else origin
        return _read(settings.deepspeed_config, f"from {named}", needed=True)
    found = (_read(path, origin) for path, origin in _recorded(entries, state))
    return next((file for file in found if file is not None), None)


def _evidence(request: RollbackRequest, chosen: Checkpoint, entries: Sequence[Entry]) -> Evidence | None:
    """What the journal knows of the next launch; None where the LR stays."""
    if request.lr_scale is None and request.lr is None:
        return None
    found = launch_evidence(chosen, entries)
    return replace(found, files=(*_named_files(request), *found.files))


def _absolute_place(text: str) -> str:
    path, colon, field = text.rpartition(":")
    if not (path and field):
        raise UsageProblem(f"--lr-in {text}: expected FILE:key.path, such as train.yaml:optimizer.lr")
    return f"{Path(path).absolute()}{colon}{field}"


def _named_files(request: RollbackRequest) -> Iterator[ConfigFile]:
    """The files of `--lr-in`; raises `UsageProblem` where one cannot be read."""
    for path in dict.fromkeys(text.rpartition(":")[0] for text in request.lr_in):
        file = _read(Path(path).absolute(), f"from --lr-in {path}", needed=True)
        assert file is not None
        yield file


def _recorded(entries: Sequence[Entry], state: CheckpointState) -> Iterator[tuple[Path, str]]:
    """(path, origin) of each config that the newest launch names."""
    starts = [(entry, start) for entry, start in events_of(entries, LaunchStart) if start.argv]
    if starts:
        entry, start = starts[-1]
        cwd = Path(start.cwd or "/")
        for word in _named_in(start.argv):
            yield cwd / word, f"from the command of launch {entry.launch}"
        named = state.config.get("deepspeed")  # TrainingArguments keep the path that they were given
        if isinstance(named, str):
            yield cwd / named, "from training_args.bin"


def _named_in(argv: Iterable[str]) -> Iterator[str]:
    words = list(argv)
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in OPTIONS:
            value = value if equals else (words[index + 1] if index + 1 < len(words) else "")
            if value.endswith(".json"):
                yield value


def _read(path: Path, origin: str, *, needed: bool = False) -> ConfigFile | None:
    try:
        return ConfigFile.read(path, origin)
    except (OSError, NotPlainConfig) as problem:
        if not needed:
            return None
        why = problem.strerror if isinstance(problem, OSError) else str(problem)
        raise UsageProblem(f"cannot read the config `{path}` ({origin}): {why}") from problem

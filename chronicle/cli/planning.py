"""Makes the plan of a rollback: find the checkpoint, refuse an unusable one, read and verify it, plan. Changes nothing."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from chronicle.checkpoints import CheckpointVerdict, find_verdict, with_launches
from chronicle.cli.transaction import OpenedRun
from chronicle.errors import UsageProblem
from chronicle.journal import Entry, compute_lineage
from chronicle.journal.events import GUARDED_SAVES, LaunchStart, StateSaved, events_of
from chronicle.journal.events import CheckpointSaved as CheckpointSaved
from chronicle.journal.events import read as read_event
from chronicle.settings import Settings
from rollback.checkpoint.layout import Checkpoint
from rollback.checkpoint.listing import (
    list_checkpoints,
    read_state,
    refuse_strays,
    select_checkpoint,
)
from rollback.checkpoint.manifest import read_manifest
from rollback.checkpoint.state import CheckpointState
from rollback.checks.verify import FATAL, Verification, check_names, refuse_unusable, verify_and_read
from rollback.errors import AmbiguousStep, CheckpointNotFound, Incomplete
from rollback.files.json_file import MAX_CHARACTERS
from rollback.findings import Finding, Severity
from rollback.lr.deepspeed import ConfigFile
from rollback.lr.rules import SchedulerClass, infer_scheduler_class
from rollback.plan.plan import Plan
from rollback.plan.request import HONOURED, Cost, RollbackRequest
from rollback.transaction.apply import plan_from_disk

__all__ = [
    "find_deepspeed_config",
    "make_plan",
]

Reader = Callable[[Checkpoint], Verification]


def _here(checkpoint: Checkpoint) -> Verification:
    return verify_and_read(checkpoint, full=True)


def make_plan(
    request: RollbackRequest,
    opened: OpenedRun,
    *,
    abandoned_by: str | None = None,
    path: Path | None = None,
    verify: str = "auto",
    read: Reader = _here,
) -> Plan:
    """Plan `request` from what is on disk now.

    `abandoned_by` picks among checkpoints of one step by the rollback that moved it away; `path` names the checkpoint,
    and the request's step is taken from it. `verify` is "full" (every byte is read), "quick", or "auto": full unless
    the journal holds the verdict of a full `chronicle verify` and no file has changed since. `read` verifies every byte
    of a checkpoint. Raises `CheckpointNotFound`, `AmbiguousStep`, `StrayFiles`, `Incomplete` or `PlanRefused`; nothing
    is changed.
    """
    entries = opened.journal.entries
    listed = with_launches(list_checkpoints(opened.root), entries)
    found = [c for c in listed if not c.path.is_symlink()]  # a link to a checkpoint is a pointer
    _refuse_link(listed, found, request.step)
    chosen = _select(found, request, abandoned_by) if path is None else _at(found, path)
    request = request if chosen.step is None else replace(request, step=chosen.step)
    refuse_strays(chosen)
    refuse_unusable(chosen, check_names(chosen))
    verdict = find_verdict(chosen.path, entries)
    _refuse_found_unsound(chosen, verdict)
    full = verify == "full" or (verify == "auto" and not (verdict and verdict.sound))
    verified = read(chosen) if full else verify_and_read(chosen)
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
        cost=_cost(request.step, opened),
        remarks=_remarks(findings, full, verdict),
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


def _select(found: Sequence[Checkpoint], request: RollbackRequest, abandoned_by: str | None) -> Checkpoint:
    if abandoned_by is None:
        return select_checkpoint(found, request.step, request.launch)
    hits = [c for c in found if c.step == request.step and (c.abandoned or "").endswith(abandoned_by.upper())]
    if len(hits) == 1:
        return hits[0]
    if hits:
        raise AmbiguousStep(f"step {request.step} was abandoned by several rollbacks ending in `{abandoned_by}`")
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
    """Steps of the present lineage after the target, and hours where the per-step log gives the pace."""
    entries = opened.journal.entries
    lineage = compute_lineage(entries)
    head = max([lineage.head_step, *(e.step for e in entries if e.kind == CheckpointSaved.KIND and e.step is not None)])
    if head <= step:
        return Cost()
    pace = _seconds_per_step(opened, lineage.head_launch)
    return Cost(steps=head - step, hours=None if pace is None else round((head - step) * pace / 3600, 2))


def _seconds_per_step(opened: OpenedRun, launch: int | None) -> float | None:
    if launch is None or not os.path.exists(opened.paths.metrics_path(launch)):
        return None
    from chronicle.metrics import read_metrics

    points = [(p.step, p.time) for p in read_metrics(opened.paths.metrics_path(launch)) if p.time is not None]
    if len(points) < 2 or points[-1][0] <= points[0][0]:
        return None
    return max(0.0, (points[-1][1] - points[0][1]) / (points[-1][0] - points[0][0]))


# --- The DeepSpeed config of the next launch

# of deepspeed.add_config_arguments, transformers' TrainingArguments, `accelerate launch`, and common scripts
OPTIONS = ("--deepspeed_config", "--deepspeed-config", "--deepspeed", "--deepspeed_config_file", "--ds_config", "--ds-config")


def find_deepspeed_config(settings: Settings, entries: Sequence[Entry], state: CheckpointState) -> ConfigFile | None:
    """The config of the next launch where the scheduler is DeepSpeed's own; None where no config is named.

    Raises `UsageProblem` when the config that the user named cannot be read.
    """
    if not any(infer_scheduler_class(s.state) is SchedulerClass.DEEPSPEED for s in state.schedulers):
        return None
    if settings.deepspeed_config is not None:
        origin = settings.origin.get("deepspeed_config", "default")
        named = "--deepspeed-config" if origin == "flag" else origin
        return _read(settings.deepspeed_config, f"from {named}", needed=True)
    found = (_read(path, origin) for path, origin in _recorded(entries, state))
    return next((file for file in found if file is not None), None)


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
        real = path.resolve(strict=True)  # the file itself is replaced; links to it stay
        if real.stat().st_size > MAX_CHARACTERS:
            raise UsageProblem(f"`{path}` ({origin}) is larger than {MAX_CHARACTERS} bytes: expected a DeepSpeed config")
        return ConfigFile(path=str(real), text=real.read_text(encoding="utf-8"), origin=origin)
    except (OSError, UnicodeDecodeError) as problem:
        if not needed:
            return None
        why = problem.strerror if isinstance(problem, OSError) else "it is not text"
        raise UsageProblem(f"cannot read the DeepSpeed config `{path}` ({origin}): {why}") from problem

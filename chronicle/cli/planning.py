"""Makes the plan of a rollback: find the checkpoint, refuse an unusable one, read and verify it, plan. Changes nothing."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from chronicle.cli.transaction import Ground, with_launches
from chronicle.errors import UsageProblem
from chronicle.journal import Entry, compute_lineage
from chronicle.settings import Settings
from chronicle.verified import CheckpointVerdict, find_verdict
from rollback.checkpoint.formats.format import read_pointer
from rollback.checkpoint.layout import Checkpoint
from rollback.checkpoint.listing import (
    list_checkpoints,
    list_newest_copies,
    read_state,
    refuse_strays,
    select_checkpoint,
)
from rollback.checkpoint.manifest import MANIFEST_NAME, read_manifest
from rollback.checkpoint.state import CheckpointState
from rollback.checks.verify import Verification, check_names, verify_and_read
from rollback.errors import AmbiguousStep, CheckpointNotFound, Incomplete
from rollback.files.json_file import MAX_CHARACTERS
from rollback.findings import WRONG_FILE, Finding, Severity
from rollback.lr.deepspeed import ConfigFile
from rollback.lr.rules import SchedulerClass, infer_scheduler_class
from rollback.plan.plan import Plan, compose_plan
from rollback.plan.request import HONOURED, Cost, RollbackRequest
from rollback.transaction.apply import read_inputs

__all__ = [
    "find_deepspeed_config",
    "make_plan",
]

POINTER_NAMES = ("latest", "latest_universal")  # deepspeed/runtime/engine.py: a text file naming a directory beside it
Reader = Callable[[Checkpoint], Verification]
FATAL = (
    "F1",
    "F2",
    "F3",
)  # what makes a checkpoint unusable, and a file of another step (F4); other disagreements a rollback may mend: shown


def _here(checkpoint: Checkpoint) -> Verification:
    return verify_and_read(checkpoint, full=True)


def make_plan(
    request: RollbackRequest,
    ground: Ground,
    *,
    abandoned_by: str | None = None,
    path: Path | None = None,
    verify: str = "auto",
    read: Reader = _here,
) -> Plan:
    """Plan `request` on what lies on disk now. `abandoned_by` picks among equals by the rollback that moved it away,
    `path` names the very checkpoint; the request's step is then taken from it.

    `verify` is "full" (every byte is read), "quick", or "auto": full unless the journal holds a verdict of a full
    `chronicle verify` and no file has changed since. `read` verifies every byte of a checkpoint.
    Raises `CheckpointNotFound`, `AmbiguousStep`, `StrayFiles`, `Incomplete`, `PlanRefused`: nothing was changed.
    """
    listed = with_launches(list_checkpoints(ground.root), ground.journal.entries)
    found = [c for c in listed if not c.path.is_symlink()]  # a link to a checkpoint is a pointer, not another one
    _refuse_link(listed, found, request.step)
    chosen = _select(found, request, abandoned_by) if path is None else _at(found, path)
    request = request if chosen.step is None else replace(request, step=chosen.step)
    refuse_strays(chosen)
    _refuse_unusable(chosen, check_names(chosen))
    verdict = find_verdict(chosen.path, ground.journal.entries)
    _refuse_found_unsound(chosen, verdict)
    full = verify == "full" or (verify == "auto" and not (verdict and verdict.sound))
    verified = read(chosen) if full else verify_and_read(chosen)
    findings = verified.findings
    _refuse_unusable(chosen, findings)
    state = verified.state or read_state(chosen)  # read again only to raise what forbids it
    manifest = None if chosen.single_file else read_manifest(chosen.path)
    memory = None if manifest is None else manifest.memory
    edited = {s.file for s in state.schedulers} | {o.file for o in state.optimizers} | set(state.located.values())
    config = find_deepspeed_config(ground.settings, ground.journal.entries, state)
    files = [*edited, *([] if manifest is None else [MANIFEST_NAME])]
    plan = compose_plan(
        request,
        chosen,
        found,
        state,
        run=ground.settings.run,
        root=str(ground.root),
        inputs=read_inputs(chosen.folder, files),
        memory=memory,
        has_manifest=manifest is not None,
        pointers=_read_pointers(ground.root),
        links={path.name: os.readlink(path) for path in ground.root.iterdir() if path.is_symlink()},
        honours=_honoured(chosen, memory, ground.journal.entries),
        config=config,
        newest_copies=list_newest_copies(ground.root) if chosen.single_file else (),
        cost=_cost(request.step, ground),
        remarks=_remarks(findings, full, verdict),
    )
    if config is not None and plan.config_edits:
        plan = replace(plan, inputs=(*plan.inputs, *read_inputs(chosen.folder, [config.path])))
    return plan


def _refuse_link(listed: Sequence[Checkpoint], found: Sequence[Checkpoint], step: int | None) -> None:
    """A step that is there only as a link to somewhere else."""
    links = [c.path for c in listed if c.step == step and c not in found]
    if links and step not in {c.step for c in found}:
        raise CheckpointNotFound(
            f"step {step} is there only as `{links[0]}`, a symbolic link to `{os.readlink(links[0])}`: a rollback needs the "
            "checkpoint itself in this directory, since it moves it",
            remedy="move the checkpoint to where the link is, or name its own directory with --checkpoints",
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
        raise CheckpointNotFound(f"`{path}` is none of this run's checkpoints: they are {names}")
    if hits[0].step is None:
        raise CheckpointNotFound(
            f"`{path}` does not say its step: neither its name nor its counters",
            remedy="`chronicle inspect` shows what it holds",
        )
    return hits[0]


def _refuse_unusable(checkpoint: Checkpoint, findings: Sequence[Finding]) -> None:
    errors = [f for f in findings if f.severity is Severity.ERROR and (f.check in FATAL or f.remedy == WRONG_FILE)]
    if errors:
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        named = "" if errors[0].message.startswith(f"`{errors[0].path}`") else f"`{errors[0].path}`: "
        raise Incomplete(
            f"checkpoint `{checkpoint.path}`: {named}{errors[0].message}{more}",
            remedy=errors[0].remedy or "`chronicle verify` says more; go back to another checkpoint",
        )


def _refuse_found_unsound(checkpoint: Checkpoint, verdict: CheckpointVerdict | None) -> None:
    """A damaged file that an earlier look has found is not looked for again: the files are the same."""
    fatal = [] if verdict is None else [error for error in verdict.errors if error[0] in FATAL]
    if verdict is not None and fatal:
        check, path, message = fatal[0]
        raise Incomplete(
            f"checkpoint `{checkpoint.path}`: `{path}`: {message} ({check}, found by `chronicle verify` on {verdict.when}, "
            "and no file has changed since)",
            remedy="go back to another checkpoint; `chronicle verify` looks at this one again",
        )


def _remarks(findings: Sequence[Finding], full: bool, verdict: CheckpointVerdict | None) -> tuple[str, ...]:
    shown = [f"{f.check} {f.path}: {f.message}" for f in findings if f.severity is not Severity.INFO]
    if full:
        depth = "every byte was read just now"
    elif verdict is not None and verdict.sound:
        depth = f"every byte was read on {verdict.when}, and no file has changed since"
    else:
        depth = "names, structure and counters only; `--verify full` reads every byte"
    return (*shown, f"verified: {depth}")


def _read_pointers(root: Path) -> dict[str, str]:
    said = {name: read_pointer(root / name) for name in POINTER_NAMES if not (root / name).is_symlink()}
    return {name: text for name, text in said.items() if text is not None}


def _honoured(chosen: Checkpoint, memory: Any, entries: Sequence[Entry]) -> frozenset[str]:
    """What the run said, when it saved the checkpoint, that it carries out; nothing is concluded from anything else.

    In the manifest; of a checkpoint that is one file, in the journal, by its name or, where nobody told that, its step.
    """
    said = memory.get("honours") if isinstance(memory, dict) else None
    if chosen.single_file:
        saves = [
            entry for entry in entries if entry.kind in ("checkpoint", "guard.saved") and entry.step == chosen.step
        ]
        named = [entry for entry in saves if Path(str(entry.data.get("path") or "")).name == chosen.path.name]
        found = named or [entry for entry in saves if entry.kind == "guard.saved"]
        said = found[-1].data.get("honours") if found else None
    return frozenset(map(str, said)) & frozenset(HONOURED) if isinstance(said, list) else frozenset()


def _cost(step: int, ground: Ground) -> Cost:
    """Steps of the present lineage after the target; hours where the per-step log knows the pace."""
    entries = ground.journal.entries
    lineage = compute_lineage(entries)
    head = max([lineage.head_step, *(e.step for e in entries if e.kind == "checkpoint" and e.step is not None)])
    if head <= step:
        return Cost()
    pace = _seconds_per_step(ground, lineage.head_launch)
    return Cost(steps=head - step, hours=None if pace is None else round((head - step) * pace / 3600, 2))


def _seconds_per_step(ground: Ground, launch: int | None) -> float | None:
    if launch is None or not os.path.exists(ground.paths.metrics_path(launch)):
        return None
    from chronicle.metrics import read_metrics

    points = [(p.step, p.time) for p in read_metrics(ground.paths.metrics_path(launch)) if p.time is not None]
    if len(points) < 2 or points[-1][0] <= points[0][0]:
        return None
    return max(0.0, (points[-1][1] - points[0][1]) / (points[-1][0] - points[0][0]))


# --- The DeepSpeed config of the next launch

# deepspeed.add_config_arguments, transformers' TrainingArguments, `accelerate launch`, and what scripts call it
OPTIONS = ("--deepspeed_config", "--deepspeed-config", "--deepspeed", "--deepspeed_config_file", "--ds_config", "--ds-config")


def find_deepspeed_config(settings: Settings, entries: Sequence[Entry], state: CheckpointState) -> ConfigFile | None:
    """The config file that goes with a checkpoint whose scheduler is DeepSpeed's own, None where nobody has named one.

    Raises `UsageProblem` when the one that a person named cannot be read.
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
    starts = [entry for entry in entries if entry.kind == "launch.start" and entry.data.get("argv")]
    if starts:
        cwd = Path(str(starts[-1].data.get("cwd") or "/"))
        for word in _named_in([str(word) for word in starts[-1].data["argv"]]):
            yield cwd / word, f"from the command of launch {starts[-1].launch}"
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
        real = path.resolve(strict=True)  # the file itself is replaced, and a link to it goes on leading there
        if real.stat().st_size > MAX_CHARACTERS:
            raise UsageProblem(f"`{path}` ({origin}) is larger than {MAX_CHARACTERS} bytes: it is no DeepSpeed config")
        return ConfigFile(path=str(real), text=real.read_text(encoding="utf-8"), origin=origin)
    except (OSError, UnicodeDecodeError) as problem:
        if not needed:
            return None
        why = problem.strerror if isinstance(problem, OSError) else "it is no text"
        raise UsageProblem(f"cannot read the DeepSpeed config `{path}` ({origin}): {why}") from problem

"""Make a plan from what is on disk now: find the checkpoint, refuse an unusable one, verify it, and say what is known of it.

Nothing is changed. `find_deepspeed_config` finds the config from which the next launch takes its LRs.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from chronicle.checkpoints import CheckpointVerdict, find_verdict, launch_evidence, name_twins, with_launches
from chronicle.errors import UsageProblem
from chronicle.goback.opened import OpenedRun
from chronicle.journal import Entry, Journal, compute_lineage
from chronicle.journal.events import (
    GUARDED_SAVES,
    CheckpointSaved,
    EntryKind,
    LaunchEnd,
    LaunchStart,
    StateSaved,
    events_of,
)
from chronicle.journal.events import read as read_event
from chronicle.metrics.log import logged_pace
from chronicle.settings import Settings, is_url
from rollback.checkpoint.layout import Checkpoint
from rollback.checkpoint.listing import list_checkpoints, read_state, refuse_strays
from rollback.checkpoint.manifest import read_manifest
from rollback.checkpoint.select import refuse_link, select_checkpoint
from rollback.checkpoint.state import CheckpointState
from rollback.checks.verify import FATAL, Verification, check_names, refuse_unusable, verify_and_read
from rollback.disk.content import ByteProgress
from rollback.errors import AmbiguousStep, CheckpointNotFound, Finding, Incomplete, PlanRefused, Severity
from rollback.files.config_text import ConfigFile, NotPlainConfig, files_named_by
from rollback.lr.authority import Evidence
from rollback.lr.deepspeed import names_scheduler
from rollback.plan.plan import Plan
from rollback.plan.request import HONOURED, Cost, RollbackRequest
from rollback.transaction.apply import plan_from_disk

ShowProgress = Callable[[int], AbstractContextManager[ByteProgress | None]]  # bytes to read -> what is told of each part
WORTH_BYTES = 200 * 10**6  # threads and a progress bar cost less than they save from here on


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Which checkpoint is meant: a step, one of a launch, one that a rollback moved away, or the one at a path."""

    step: int = 0
    launch: int | None = None
    abandoned_by: str | None = None  # the end of a rollback's id
    path: Path | None = None

    @classmethod
    def parse(cls, text: str) -> "Target":
        """`30500`, `30500@8`, `30500@` with the end of a rollback's id, or a path. Raises `UsageProblem`."""
        found = re.fullmatch(r"(\d+)(?:@(\w+))?", text.strip())
        if found is None and (os.path.lexists(text) or is_url(text)):
            return cls(path=Path(text))
        if found is None:
            raise UsageProblem(f"--to {text}: expected STEP, STEP@LAUNCH or a path, such as 30500 or 30500@8")
        step, of = int(found[1]), found[2]
        if of is None:
            return cls(step=step)
        if of.isdigit() and len(of) < 8:
            return cls(step=step, launch=int(of))
        return cls(step=step, abandoned_by=of)


def plan(
    request: RollbackRequest,
    opened: OpenedRun,
    target: Target | None = None,
    *,
    verify: str = "auto",
    progress: ShowProgress = lambda _: nullcontext(),
) -> Plan:
    """Plan `request` from what is on disk now; nothing is changed.

    `target` picks among checkpoints of one step, or names one by its path, from which the step is taken. `verify` is "full"
    (every byte is read), "quick", or "auto": full unless the journal holds the verdict of a full `chronicle verify` and no
    file has changed since. Raises `CheckpointNotFound`, `AmbiguousStep`, `StrayFiles`, `Incomplete` or `PlanRefused`.
    """
    entries = opened.journal.entries
    found = with_launches(list_checkpoints(opened.root), entries)
    chosen = _select(found, request, target or Target(), opened)
    if chosen.path == Path(os.path.abspath(opened.root)):
        raise PlanRefused(
            f"`{opened.root}` is a checkpoint itself: a rollback exchanges checkpoints inside a directory",
            remedy=f"name the directory that holds it, and nothing of another run: --checkpoints {chosen.path.parent}",
        )
    refuse_link(chosen)
    if chosen.step is not None:
        request = replace(request, step=chosen.step)
    refuse_strays(chosen)
    refuse_unusable(chosen, check_names(chosen))
    verdict = find_verdict(chosen.path, entries)
    _refuse_found_unsound(chosen, verdict)
    known_sound = verdict is not None and verdict.sound
    full = verify == "full" or (verify == "auto" and not known_sound)
    verified = _read_every_byte(chosen, progress) if full else verify_and_read(chosen)
    refuse_unusable(chosen, verified.findings)
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
        remarks=(*_remarks(verified.findings, full, verdict), *name_twins(chosen)),
    )


def _read_every_byte(checkpoint: Checkpoint, progress: ShowProgress) -> Verification:
    """Verify one checkpoint with its checksums; a large one on all cores."""
    if checkpoint.size_bytes < WORTH_BYTES:
        return verify_and_read(checkpoint, full=True)
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(os.cpu_count()) as executor, progress(checkpoint.size_bytes) as bar:
        return verify_and_read(checkpoint, full=True, executor=executor, progress=bar)


def has_guard(plan: Plan, journal: Journal) -> bool:
    """Whether a guard recorded the checkpoint or a launch of this run, so that one will check the next launch."""
    if any(journal.of_kind(EntryKind.GUARD_ATTACHED, EntryKind.GUARD_VERDICT, EntryKind.GUARD_SAVED)):
        return True
    manifest = read_manifest(Path(plan.source)) if plan.has_manifest else None
    return bool(manifest is not None and manifest.memory)


# --- the checkpoint


def _select(found: Sequence[Checkpoint], request: RollbackRequest, target: Target, opened: OpenedRun) -> Checkpoint:
    if target.path is not None:
        return _at(found, target.path, opened)
    by = target.abandoned_by
    if by is None:
        return select_checkpoint(found, request.step, request.launch, Path(opened.root))
    hits = [one for one in found if one.step == request.step and (one.abandoned or "").endswith(by.upper())]
    if len(hits) == 1:
        return hits[0]
    if hits:
        text = f"step {request.step} was abandoned by several rollbacks ending in `{by}`"
        raise AmbiguousStep(text, "use more characters of the id")
    text = f"no checkpoint of step {request.step} abandoned by a rollback `{by}`"
    raise CheckpointNotFound(text, remedy="`chronicle log` lists the rollbacks")


def _at(found: Sequence[Checkpoint], path: Path, opened: OpenedRun) -> Checkpoint:
    """The listed checkpoint at `path`, in the root or among the abandoned ones."""
    if opened.bucket is not None and is_url(path):
        from rollback.disk.remote import local_path

        path = local_path(path)
    wanted = Path(os.path.abspath(path))
    hits = [one for one in found if wanted in _places(one) or one.path.resolve() == wanted.resolve()]
    if not hits:
        names = ", ".join(one.path.name for one in found[:8]) or "none"
        raise CheckpointNotFound(f"`{path}` is not a checkpoint of this run: expected one of {names}")
    if hits[0].step is None:
        raise CheckpointNotFound(
            f"the step of `{path}` is unknown: expected it in the name or in the counters",
            remedy="`chronicle inspect` shows what it holds",
        )
    return hits[0]


def _places(one: Checkpoint) -> tuple[Path, ...]:
    """Where it lies: its path, and of files side by side that of each part."""
    return (one.path, *(one.folder / name for name in one.names[1:]))


def _refuse_found_unsound(checkpoint: Checkpoint, verdict: CheckpointVerdict | None) -> None:
    """Raise `Incomplete` when `chronicle verify` found a damaged file before, and no file has changed since."""
    if verdict is None:
        return
    for check, path, message in verdict.errors:
        if check in FATAL:
            raise Incomplete(
                f"checkpoint `{checkpoint.path}`: `{path}`: {message} ({check}, found by `chronicle verify` on "
                f"{verdict.when}; no file has changed since)",
                remedy="go back to another checkpoint; `chronicle verify` checks this one again",
            )


# --- what is known of it


def _remarks(findings: Sequence[Finding], full: bool, verdict: CheckpointVerdict | None) -> Iterator[str]:
    for finding in findings:
        if finding.severity is not Severity.INFO:
            yield f"{finding.check} {finding.path}: {finding.message}"
    if full:
        yield "verified: every byte was read now"
    elif verdict is not None and verdict.sound:
        yield f"verified: every byte was read on {verdict.when}; no file has changed since"
    else:
        yield "verified: names, structure and counters only; `--verify full` reads every byte"


def _honoured(chosen: Checkpoint, memory: Mapping[str, object] | None, entries: Sequence[Entry]) -> frozenset[str]:
    """The options that the run supports at run time: `honours`, as declared when the checkpoint was saved.

    They are in the manifest; for a checkpoint that is a single file, in the journal entry of its save.
    """
    listed = None if memory is None else memory.get("honours")
    if chosen.single_file:
        saves = [read_event(entry) for entry in entries if entry.kind in GUARDED_SAVES and entry.step == chosen.step]
        events = [event for event in saves if isinstance(event, CheckpointSaved | StateSaved)]
        named = [event for event in events if Path(event.path or "").name == chosen.path.name]
        found = named or [event for event in events if isinstance(event, StateSaved)]
        listed = found[-1].honours if found else None
    return frozenset(map(str, listed)) & frozenset(HONOURED) if isinstance(listed, list) else frozenset()


def _cost(step: int, opened: OpenedRun) -> Cost:
    """Steps of the present lineage after the target, and hours where the per-step log gives the pace.

    Of a launch whose end nobody recorded (it was killed with its supervisor), the log says how far it came.
    """
    entries = opened.journal.entries
    lineage = compute_lineage(entries)
    head = max([lineage.head_step, *(entry.step or 0 for entry in opened.journal.of_kind(EntryKind.CHECKPOINT))])
    started = max((entry.launch or 0 for entry, _ in events_of(entries, LaunchStart)), default=0)
    unended = started > 0 and all(entry.launch != started for entry, _ in events_of(entries, LaunchEnd))
    last, pace = logged_pace(opened.paths, started if unended else lineage.head_launch)
    if unended:
        head = max(head, last or 0)
    if head <= step:
        return Cost()
    return Cost(steps=head - step, hours=None if pace is None else round((head - step) * pace / 3600, 2))


def _evidence(request: RollbackRequest, chosen: Checkpoint, entries: Sequence[Entry]) -> Evidence | None:
    """What the journal knows of the next launch, and the files of `--lr-in`; None where the LR stays.

    Raises `UsageProblem` where such a file cannot be read.
    """
    if request.lr_scale is None and request.lr is None:
        return None
    found = launch_evidence(chosen, entries)
    paths = dict.fromkeys(text.rpartition(":")[0] for text in request.lr_in)
    named = [_read(Path(path).absolute(), f"from --lr-in {path}") for path in paths]
    return replace(found, files=(*named, *found.files))


# --- The DeepSpeed config of the next launch

def find_deepspeed_config(settings: Settings, entries: Sequence[Entry], state: CheckpointState) -> ConfigFile | None:
    """The config of the next launch where the scheduler is DeepSpeed's own; None where no config is named.

    Raises `UsageProblem` when the config that the user named cannot be read.
    """
    if not any("last_batch_iteration" in scheduler.state for scheduler in state.schedulers):  # else it is not asked
        return None
    if settings.deepspeed_config is not None:
        origin = settings.origin.get("deepspeed_config", "default")
        named = "--deepspeed-config" if origin == "flag" else origin
        return _read(settings.deepspeed_config, f"from {named}")
    return next((file for file in _recorded(entries, state) if names_scheduler(file)), None)


def _recorded(entries: Sequence[Entry], state: CheckpointState) -> Iterator[ConfigFile]:
    """The config files that the newest launch names, and the one that TrainingArguments were given."""
    starts = [(entry, start) for entry, start in events_of(entries, LaunchStart) if start.argv]
    if not starts:
        return
    entry, start = starts[-1]
    cwd = Path(start.cwd or "/")
    yield from files_named_by(start.argv, cwd, f"from the command of launch {entry.launch}")
    yield from files_named_by([str(state.config.get("deepspeed"))], cwd, "from training_args.bin")


def _read(path: Path, origin: str) -> ConfigFile:
    try:
        return ConfigFile.read(path, origin)
    except (OSError, NotPlainConfig) as problem:
        why = problem.strerror if isinstance(problem, OSError) else str(problem)
        raise UsageProblem(f"cannot read the config `{path}` ({origin}): {why}") from problem

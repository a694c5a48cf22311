"""One replay: where it begins, what it starts, how its prints compare with the record, and the entry about it.

A replay is planned from the journal and the prints: the launch whose step it is, and the nearest verified checkpoint that
this launch saved, or began from. The recorded command is then started in a sandbox (`sandbox.py`, `inside.py`), stopped after
the last step, and compared print by print (`verdict.py`). Where equal input gave another result, it is played a second time.
What is missing for any of this is named, and nothing is started.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from chronicle.checkpoints import find_checkpoint_roots, find_verdict, known_states, with_launches
from chronicle.credentials import hidden_arguments
from chronicle.errors import ChronicleError, Refusal, UsageProblem
from chronicle.journal import Entry, JournalWriter, compute_lineage, read_journal
from chronicle.journal.events import GuardVerdict, LaunchStart, Replayed, RollbackReceipt, events_of
from chronicle.journal.place import anchors_of
from chronicle.launch.provenance import ALLOWED_VARIABLES
from chronicle.paths import list_launch_numbers
from chronicle.replay.facts import changed_facts, read_facts
from chronicle.replay.inside import Spec
from chronicle.replay.ring import Print, Ring, rings_of
from chronicle.replay.sandbox import SandboxRefused, minimal
from chronicle.replay.verdict import (
    PrintComparison,
    ReplayVerdict,
    Ruling,
    compare_prints,
    judge_replay,
    prints_agree,
)
from chronicle.resume.batch_record import read_batches
from chronicle.settings import Settings
from rollback.checkpoint.layout import Checkpoint
from rollback.checkpoint.listing import list_checkpoints, read_identity
from rollback.checks.verify import verify_checkpoint
from rollback.errors import RollbackError, Severity

__all__ = ["Replay", "ReplayPlan", "plan_replay", "record_replay", "replay"]

# A replay tells no tracker: what these libraries read for "do nothing", or write into the sandbox.
NO_TRACKERS = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "MLFLOW_TRACKING_URI": "file:{sandbox}/mlflow",
    "CLEARML_OFFLINE_MODE": "1",
    "TRACKIO_DIR": "{sandbox}/trackio",
}
KEPT_VARIABLES = ("CHRONICLE_BATCH_TEXT",)
OF_THE_JOB = re.compile(r"SLURM_\w+|MASTER_(ADDR|PORT)|NODE_RANK|TORCHELASTIC_\w+")
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlan:
    """What a replay will do."""

    settings: Settings
    step: int
    until: int
    launch: int
    start: int  # steps completed by the checkpoint
    checkpoint: Checkpoint | None  # None: from the beginning
    identity: Mapping[str, Any]
    command: tuple[str, ...]
    cwd: Path
    environ: Mapping[str, str]
    roots: tuple[Path, ...]
    rings: Mapping[int, Ring]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What came out."""

    plan: ReplayPlan
    judged: Ruling
    comparison: PrintComparison
    replays: int
    seconds: float


# ---- the plan ----------------------------------------------------------------------------------------------------------


def plan_replay(
    settings: Settings,
    step: int,
    *,
    launch: int | None = None,
    until: int | None = None,
    command: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
) -> ReplayPlan:
    """ReplayPlan the replay of a step. Raises `Refusal` or `UsageProblem` with the missing piece; nothing is started."""
    if step < 1:
        raise UsageProblem(f"step is {step}: expected 1 or more", "steps count completed optimizer steps")
    if until is not None and until < step:
        raise UsageProblem(f"--until is {until}: expected {step} or more")
    entries = read_journal(settings.paths).entries
    number, rings = _launch_of(settings, entries, step, launch)
    last = until or _next_print(rings, step)
    starts = [start for entry, start in events_of(entries, LaunchStart) if entry.launch == number]
    if not starts:
        raise Refusal(f"the journal has no start of launch {number}: its command is not known")
    if len({start.host for start in starts}) > 1:
        raise Refusal(f"launch {number} ran on {len(starts)} nodes: a replay starts one", "replay a launch of one node")
    start = starts[0]
    if rings[min(rings)].header.get("ranks") != len(rings):
        asked = rings[min(rings)].header.get("ranks")
        raise Refusal(f"launch {number} had {asked} ranks, and prints of {len(rings)} are here")
    if hidden := hidden_arguments(tuple(start.argv)) if not command else ():
        raise UsageProblem(
            f"the recorded command hides {', '.join(hidden)}",
            f"give it again: chronicle replay {step} -- {' '.join(start.argv)}",
        )
    if not Path(start.cwd).is_dir():
        raise Refusal(f"the working directory of launch {number}, `{start.cwd}`, is not there any more")
    roots = _roots(settings, entries)
    checkpoint, begins, identity = _nearest(settings, entries, number, step, roots)
    by_another = checkpoint is not None and identity.get("launch") != number
    if by_another and (settings.paths.run_dir / "contract.json").exists() and _is_later_rollback(entries, number):
        raise Refusal(
            f"launch {number} began under another contract than the run has now (a later rollback replaced it)",
            f"replay a step after its first own checkpoint: --launch {number}",
        )
    return ReplayPlan(
        settings=settings,
        step=step,
        until=last,
        launch=number,
        start=begins,
        checkpoint=checkpoint,
        identity=identity,
        command=tuple(command) or tuple(start.argv),
        cwd=Path(start.cwd),
        environ=_environment(environ, start, checkpoint, begins, roots),
        roots=roots,
        rings=rings,
    )


def _launch_of(
    settings: Settings, entries: Sequence[Entry], step: int, launch: int | None
) -> tuple[int, Mapping[int, Ring]]:
    """The launch whose step it is, and its prints."""
    holders: dict[int, Mapping[int, Ring]] = {}
    for number in [launch] if launch is not None else list_launch_numbers(settings.paths):
        rings = rings_of(settings.paths.launch_dir(number))
        if rings and _next_print_or_none(rings, step) is not None:
            holders[number] = rings
    if not holders:
        where = f"launch {launch}" if launch is not None else f"run {settings.run}"
        raise Refusal(
            f"{where} has no prints of step {step} or after it, so there is nothing to compare a replay with",
            "step prints are made by guarded launches under `chronicle run` (docs/replay.md)",
        )
    owner = compute_lineage(entries).owner(step)
    if launch is None and owner in holders:
        return owner, holders[owner]
    if len(holders) > 1:
        raise UsageProblem(
            f"step {step} was taken by launches {', '.join(map(str, holders))}, none of them in the present lineage",
            f"name one: --launch {max(holders)}",
        )
    return next(iter(holders.items()))


def _next_print_or_none(rings: Mapping[int, Ring], step: int) -> int | None:
    """The first printed step of all ranks that is not before `step`, where prints before it or a beginning are there, too."""
    common = set.intersection(*(set(ring.steps()) for ring in rings.values()))
    begins = min((one.step for ring in rings.values() for one in ring.begins()), default=min(common, default=0))
    return min((one for one in common if one >= step), default=None) if begins < step else None


def _next_print(rings: Mapping[int, Ring], step: int) -> int:
    found = _next_print_or_none(rings, step)
    assert found is not None
    return found


def _roots(settings: Settings, entries: Sequence[Entry]) -> tuple[Path, ...]:
    found = [
        *([settings.checkpoints_dir] if settings.checkpoints_dir else []),
        *find_checkpoint_roots(entries, None, Path.cwd()),
        *map(Path, anchors_of(settings.paths).roots),
    ]
    return tuple(dict.fromkeys(Path(os.path.abspath(path)) for path in found))


def _nearest(
    settings: Settings, entries: Sequence[Entry], number: int, step: int, roots: Sequence[Path]
) -> tuple[Checkpoint | None, int, Mapping[str, Any]]:
    """The newest verified checkpoint before `step` that the launch saved or began from; its step and identity.

    None for a launch that began from scratch and has none.
    """
    verdicts = [verdict for entry, verdict in events_of(entries, GuardVerdict) if entry.launch == number]
    loaded = next((verdict.loaded for verdict in verdicts if verdict.loaded and verdict.loaded.get("launch") != number), {})
    states = known_states(entries)
    listed = {one.path: one for root in roots for one in with_launches(list_checkpoints(root), entries)}
    found: list[tuple[int, Checkpoint, Mapping[str, Any]]] = []
    for one in listed.values():
        try:
            identity: Mapping[str, Any] = read_identity(one) or states.identity_of(one.path, {}) or {}
        except (RollbackError, OSError):
            continue
        own = identity.get("launch", one.launch)
        at = identity.get("step", one.step)
        is_origin = bool(loaded) and bool(identity) and identity.get("id") == loaded.get("id")
        if isinstance(at, int) and at < step and (own == number or is_origin):
            found.append((at, one, identity))
    problems = []
    for at, one, identity in sorted(found, key=lambda row: row[0], reverse=True):
        why = _why_unsound(one, entries)
        if not why:
            return one, at, identity
        problems.append(f"step {at} ({one.path.name}): {why}")
    fresh = verdicts and not loaded and all(verdict.basis in ("fresh", "none", "") for verdict in verdicts)
    if fresh or not verdicts:
        return None, 0, {}
    more = f"; {problems[0]}" if problems else ""
    raise Refusal(
        f"no verified checkpoint of launch {number} before step {step} is left{more}",
        "a checkpoint that the launch saved, or the one that it began from, is needed",
    )


def _why_unsound(one: Checkpoint, entries: Sequence[Entry]) -> str:
    """Why it cannot be begun from, "" where every byte of it was read and nothing is wrong."""
    verdict = find_verdict(one.path, entries)
    if verdict is not None and verdict.sound:
        return ""
    try:
        errors = [finding for finding in verify_checkpoint(one, full=True) if finding.severity is Severity.ERROR]
    except (RollbackError, OSError) as problem:
        return str(problem)
    return errors[0].message if errors else ""


def _is_later_rollback(entries: Sequence[Entry], number: int) -> bool:
    begun = next((entry.id for entry, _ in events_of(entries, LaunchStart) if entry.launch == number), "")
    return any(entry.id > begun for entry, _ in events_of(entries, RollbackReceipt))


def _environment(
    environ: Mapping[str, str], start: LaunchStart, checkpoint: Checkpoint | None, step: int, roots: Sequence[Path]
) -> dict[str, str]:
    """Ours, with the recorded variables as they were, and what tells a launch to begin from the checkpoint."""
    found = {name: value for name, value in environ.items() if not name.startswith("CHRONICLE_") or name in KEPT_VARIABLES}
    for name in [name for name in found if ALLOWED_VARIABLES.fullmatch(name) and not OF_THE_JOB.fullmatch(name)]:
        del found[name]
    found |= {name: str(value) for name, value in start.environment.items() if not OF_THE_JOB.fullmatch(name)}
    found |= {"CHRONICLE_GUARD": "warn", "CHRONICLE_PRINTS": "every", "CHRONICLE_REPLAY": "1"}
    if start.accept_change:
        found["CHRONICLE_ACCEPT_CHANGE"] = start.accept_change
    if checkpoint is not None:
        place = checkpoint.path if checkpoint.abandoned is None else roots[0] / checkpoint.path.name
        found |= {"CHRONICLE_RESUME_FROM": str(place), "CHRONICLE_RESUME_STEP": str(step)}
    return found


# ---- the replay --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Played:
    """One replay that was played."""

    prints: Mapping[int, Mapping[int, Print]]
    begins: Mapping[int, Print]
    start: int
    facts: Mapping[str, Any] | None
    end: Mapping[str, Any]
    batches: Mapping[int, list[int]]


def replay(plan: ReplayPlan, *, sandbox: Path | None = None, once: bool = False, say: Say = lambda line: None) -> Replay:
    """Play it, a second time where only that can tell, and judge. Raises `ChronicleError` when it could not be played."""
    begun = time.monotonic()
    record = {rank: {**{one.step: one for one in ring.begins()}, **ring.steps()} for rank, ring in plan.rings.items()}
    say(f"launch {plan.launch} again from {_from(plan)}, to step {plan.until}")
    one = _play(plan, sandbox, say)
    comparison = _compare(record, one, plan.until)
    facts = read_facts(plan.settings.paths.launch_dir(plan.launch))
    found, known = [], False
    if facts is not None and one.facts is not None:
        found, known = [(item.kind, item.words) for item in changed_facts(facts, one.facts)], True
    judged = judge_replay(comparison, None, None, changed=found, facts_known=known)
    replays = 1
    if judged.again and not once and comparison.first is not None:
        say(f"equal input and another result ({comparison.first.words}): a second replay")
        two = _play(plan, sandbox, say)
        replays = 2
        steps = [step for step in comparison.steps if step <= comparison.first.step]
        same = prints_agree(one.prints, two.prints, steps)
        judged = judge_replay(comparison, _compare(record, two, plan.until), same, changed=found, facts_known=known)
    if judged.verdict is ReplayVerdict.DATA:
        judged = _with_batches(judged, plan, one, comparison)
    return Replay(plan=plan, judged=judged, comparison=comparison, replays=replays, seconds=time.monotonic() - begun)


def _from(plan: ReplayPlan) -> str:
    return "its beginning" if plan.checkpoint is None else f"step {plan.start} (`{plan.checkpoint.path}`)"


def _compare(record: Mapping[int, Mapping[int, Print]], one: _Played, until: int) -> PrintComparison:
    return compare_prints(record, one.prints, start=one.start, until=until, begins=one.begins)


def _play(plan: ReplayPlan, sandbox: Path | None, say: Say) -> _Played:
    if sandbox is not None:
        sandbox.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="chronicle-replay-", dir=sandbox)).resolve()
    try:
        return _read_result(_start(plan, directory), plan)
    finally:
        shutil.rmtree(directory, onerror=_make_writable)


def _make_writable(function: Callable[..., Any], path: str, _: Any) -> None:
    """The kernel's own directory of an overlay has no permissions."""
    try:
        os.chmod(path, 0o700)
    except OSError:
        return
    shutil.rmtree(path, ignore_errors=True)


def _start(plan: ReplayPlan, directory: Path) -> Path:
    paths = plan.settings.paths
    anchors = [paths.run_dir, *plan.roots, *(root.parent / "abandoned" for root in plan.roots), plan.cwd]
    trackers = {name: value.format(sandbox=directory) for name, value in NO_TRACKERS.items()}
    spec = Spec(
        run_dir=str(paths.run_dir.resolve()),
        roots=tuple(map(str, plan.roots)),
        checkpoint="" if plan.checkpoint is None else str(plan.checkpoint.path),
        name="" if plan.checkpoint is None else plan.checkpoint.path.name,
        start=plan.start,
        until=plan.until,
        ranks=tuple(sorted(plan.rings)),
        command=plan.command,
        cwd=str(plan.cwd),
        environ={**plan.environ, **trackers},
        overlaid=tuple(map(str, minimal(anchors))),
        sandbox=str(directory),
        launch=plan.launch,
    )
    (directory / "spec.json").write_text(json.dumps(asdict(spec)), encoding="utf-8")
    words = [sys.executable, "-m", "chronicle.replay.inside", str(directory / "spec.json")]
    with (directory / "output.log").open("wb") as log:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, check=False)
    if not (directory / "result" / "end.json").exists():
        tail = (directory / "output.log").read_text(errors="replace").strip().splitlines()[-3:]
        raise ChronicleError(f"the replay ended with code {done.returncode}: {' / '.join(tail)}")
    return directory / "result"


def _read_result(result: Path, plan: ReplayPlan) -> _Played:
    end = json.loads((result / "end.json").read_text(encoding="utf-8"))
    if "refused" in end:
        raise SandboxRefused(f"the replay was not started: {end['refused']}", end.get("remedy"))
    rings = rings_of(result / "launch")
    begins = {rank: [one for one in ring.begins() if one.step < plan.step] for rank, ring in rings.items()}
    if not rings or not all(begins.values()):
        log = result / "launch" / "supervisor.log"
        lines = log.read_text(errors="replace").strip().splitlines()[-6:] if log.exists() else []
        why = str(end["end"].get("because") or "it ended")
        raise ChronicleError(f"the replay took no step that could be compared ({why}): {' / '.join(lines)[-600:]}")
    starts = {rank: rows[-1] for rank, rows in begins.items()}
    return _Played(
        prints={rank: ring.steps() for rank, ring in rings.items()},
        begins=starts,
        start=max(one.step for one in starts.values()),
        facts=read_facts(result / "launch"),
        end=end,
        batches=_batches_of(result / "batches", end["launch"], 0),
    )


def _batches_of(directory: Path, launch: int, rank: int) -> dict[int, list[int]]:
    """By step: the digests of the micro-batches that a launch took, as `batches.py` recorded them."""
    found: dict[int, list[int]] = {}
    for digest, step in read_batches(directory, launch, rank):
        found.setdefault(step, []).append(digest)
    return found


def _with_batches(judged: Ruling, plan: ReplayPlan, one: _Played, comparison: PrintComparison) -> Ruling:
    """Which batch it was, from the record of all batches: one of another step, one taken twice, or one that is no other."""
    first = comparison.first
    assert first is not None
    rank = first.ranks[0]
    record = _batches_of(plan.settings.paths.batches_dir, plan.launch, rank)
    mine = one.batches if rank == 0 else {}
    words = []
    theirs, ours = record.get(first.step, []), mine.get(first.step, [])
    elsewhere = {digest: step for step, digests in mine.items() for digest in digests}
    for place, (a, b) in enumerate(zip(theirs, ours, strict=False), start=1):
        if a == b:
            continue
        step = elsewhere.get(a)
        twice = Counter(digest for digests in record.values() for digest in digests)[a] > 1
        what = f"that of step {step} in the replay" if step is not None else "none that the replay has taken"
        words.append(f"micro-batch {place} of step {first.step} was {what}" + (", and was taken twice" if twice else ""))
    if theirs and theirs == ours:
        words.append("the same rows as far as samples tell: single values, or labels, are others")
    later = [step for step in sorted(record.keys() & mine.keys()) if step > first.step]
    equal = sum(record[step] == mine[step] for step in later)
    if later:
        words.append(f"after it {equal} of {len(later)} steps have equal batches")
    return Ruling(verdict=judged.verdict, why=judged.why, evidence=(*judged.evidence, *words))


# ---- the entry ---------------------------------------------------------------------------------------------------------


def record_replay(found: Replay) -> Entry:
    """Write the entry about a replay into the journal of the run: all that a replay leaves there."""
    plan, judged = found.plan, found.judged
    event = Replayed(
        verdict=judged.verdict.value,
        why=judged.why,
        evidence=judged.evidence,
        until=plan.until,
        start=plan.start,
        checkpoint=None if plan.checkpoint is None else str(plan.checkpoint.path),
        identity=dict(plan.identity),
        compared=len(found.comparison.steps),
        parts=tuple(sorted(found.comparison.parts)),
        replays=found.replays,
        seconds=round(found.seconds, 1),
    )
    title = f"replay of step {plan.step}: {judged.verdict.value} ({judged.why})"
    with JournalWriter(plan.settings.paths) as writer:
        return writer.write(event, launch=plan.launch, step=plan.step, title=title)

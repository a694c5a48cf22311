"""A fork: a recorded launch once more, in a private view, from a checkpoint, with its code of today or as it was recorded.

It must not touch the run. It begins here: which launch, from which verified checkpoint, with which command and variables
(`Origin`); and the launch in its sandbox (`sandbox.py`, `inside.py`), whose logs and prints can be read until it is over.
What is missing for any of this is named, and nothing is started.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from chronicle.checkpoints import find_checkpoint_roots, find_verdict, known_states, with_launches
from chronicle.credentials import hidden_arguments
from chronicle.errors import ChronicleError, Refusal, UsageProblem
from chronicle.journal import Entry, read_journal
from chronicle.journal.events import GuardVerdict, LaunchStart, RollbackReceipt, events_of
from chronicle.journal.place import anchors_of
from chronicle.launch.code import CodeChange, top_of
from chronicle.launch.provenance import ALLOWED_VARIABLES
from chronicle.replay.inside import Spec
from chronicle.replay.places import found_near, holder_of, identity_of, own_places
from chronicle.replay.sandbox import SandboxRefused, minimal
from chronicle.settings import Settings
from rollback.checkpoint.layout import Checkpoint
from rollback.checkpoint.listing import list_checkpoints
from rollback.checks.verify import verify_checkpoint
from rollback.errors import RollbackError, Severity

# A fork tells no tracker: what these libraries read for "do nothing", or write into the sandbox.
NO_TRACKERS = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "MLFLOW_TRACKING_URI": "file:{sandbox}/mlflow",
    "CLEARML_OFFLINE_MODE": "1",
    "TRACKIO_DIR": "{sandbox}/trackio",
}
KEPT_VARIABLES = ("CHRONICLE_BATCH_TEXT",)
OF_A_FORK = {"CHRONICLE_GUARD": "warn", "CHRONICLE_PRINTS": "every", "CHRONICLE_REPLAY": "1"}
OF_THE_JOB = re.compile(r"SLURM_\w+|MASTER_(ADDR|PORT)|NODE_RANK|TORCHELASTIC_\w+")
Say = Callable[[str], None]
AsRecorded = tuple[int, Checkpoint, Mapping[str, Any]]  # steps completed, checkpoint, its identity


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where forks begin: a launch of the run, its command, and a checkpoint."""

    settings: Settings
    launch: int
    start: int  # steps completed by the checkpoint
    checkpoint: Checkpoint | None  # None: from the beginning
    identity: Mapping[str, Any]
    command: tuple[str, ...]
    cwd: Path
    environ: Mapping[str, str]
    roots: tuple[Path, ...]
    restored: tuple[str, ...] = ()  # variables that are set otherwise now, and as in the record in a fork
    passed_by: tuple[str, ...] = ()  # nearer checkpoints that nobody can begin from, and why; in words

    @property
    def own(self) -> tuple[Path, ...]:
        """What is the run's own: its directory, and its checkpoints."""
        return own_places(self.settings.paths.run_dir, self.roots, self.cwd)

    @property
    def words(self) -> str:
        """In a few words."""
        return "its beginning" if self.checkpoint is None else f"step {self.start} (`{self.checkpoint.path}`)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Forked:
    """What a fork left. `directory` is there until the fork is over: `launch/` holds its logs, metrics and prints."""

    directory: Path
    end: Mapping[str, Any]


# ---- where it begins ---------------------------------------------------------------------------------------------------


def _start_of(entries: Sequence[Entry], number: int) -> LaunchStart:
    """The recorded start of a launch of one node. Raises `Refusal` where it cannot be started again."""
    starts = [start for entry, start in events_of(entries, LaunchStart) if entry.launch == number]
    if not starts:
        raise Refusal(f"the journal has no start of launch {number}: its command is not known")
    if len({start.host for start in starts}) > 1:
        raise Refusal(f"launch {number} ran on {len(starts)} nodes: a replay starts one", "replay a launch of one node")
    if not Path(starts[0].cwd).is_dir():
        raise Refusal(f"the working directory of launch {number}, `{starts[0].cwd}`, is not there any more")
    return starts[0]


def find_origin(
    settings: Settings,
    entries: Sequence[Entry],
    number: int,
    before: int,
    *,
    again: str,
    command: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
) -> Origin:
    """The nearest verified checkpoint of launch `number` before step `before`, and its command.

    `again`: the command line to give the hidden arguments after. Raises `Refusal` or `UsageProblem` with the missing piece.
    """
    start = _start_of(entries, number)
    if hidden := hidden_arguments(tuple(start.argv)) if not command else ():
        raise UsageProblem(
            f"the recorded command hides {', '.join(hidden)}", f"give it again: {again} -- {' '.join(start.argv)}"
        )
    roots = _roots(settings, entries, Path(start.cwd))
    (begins, checkpoint, identity), passed_by = _nearest(settings, entries, number, before, roots)
    by_another = checkpoint is not None and identity.get("launch") != number
    if by_another and (settings.paths.run_dir / "contract.json").exists() and _is_later_rollback(entries, number):
        raise Refusal(
            f"launch {number} began under another contract than the run has now (a later rollback replaced it)",
            f"replay a step after its first own checkpoint: --launch {number}",
        )
    return Origin(
        settings=settings,
        launch=number,
        start=begins,
        checkpoint=checkpoint,
        identity=identity,
        command=tuple(command) or tuple(start.argv),
        cwd=Path(start.cwd),
        environ=_environment(environ, start, checkpoint, begins, roots),
        roots=roots,
        restored=tuple(_set_otherwise(environ, start)),
        passed_by=passed_by,
    )


def recorded_code_of(settings: Settings, entries: Sequence[Entry], number: int) -> CodeChange:
    """The commit and the uncommitted changes of a launch. Raises `Refusal` where they are not recorded whole."""
    start = _start_of(entries, number)
    top = top_of(Path(start.cwd))
    if start.git_commit is None or top is None:
        raise Refusal(f"launch {number} ran in no git repository, or it is gone: its code is not known")
    patch = start.code_patch
    if start.git_dirty_digest is not None and not patch.get("sha256"):
        raise Refusal(f"the uncommitted changes of launch {number} were not kept: {patch.get('why') or 'no patch is recorded'}")
    if patch.get("hidden"):
        raise Refusal(f"the recorded changes of launch {number} hide what looks like a secret: they are not whole")
    kept = settings.paths.object_path(str(patch["sha256"])) if patch.get("sha256") else None
    if kept is not None and not kept.is_file():
        raise Refusal(f"the patch of launch {number}, `{kept}`, is not there any more")
    return CodeChange(top=str(top), commit=start.git_commit, patch="" if kept is None else str(kept))


def _roots(settings: Settings, entries: Sequence[Entry], cwd: Path | None = None) -> tuple[Path, ...]:
    """Where checkpoints lie: as it is told or recorded; else, below `cwd`, where states are that the guard saw being taken."""
    found = [
        *([settings.checkpoints_dir] if settings.checkpoints_dir else []),
        *find_checkpoint_roots(entries, None, Path.cwd()),
        *map(Path, anchors_of(settings.paths).roots),
    ]
    if not found and cwd is not None:
        found = list(found_near(cwd, settings.paths.run_dir, entries))
    return tuple(dict.fromkeys(holder_of(Path(os.path.abspath(path))) for path in found))


def _listed(roots: Sequence[Path], entries: Sequence[Entry]) -> Iterator[AsRecorded]:
    states = known_states(entries)
    listed = {one.path: one for root in roots for one in with_launches(list_checkpoints(root), entries)}
    for one in listed.values():
        try:
            identity: Mapping[str, Any] = identity_of(one, states) or states.identity_of(one.path, {}) or {}
        except (RollbackError, OSError):
            continue
        at = identity.get("step", one.step)
        if isinstance(at, int):
            yield at, one, identity


def _nearest(
    settings: Settings, entries: Sequence[Entry], number: int, step: int, roots: Sequence[Path]
) -> tuple[tuple[int, Checkpoint | None, Mapping[str, Any]], tuple[str, ...]]:
    """The newest verified checkpoint before `step` that the launch saved or began from, and why newer ones were passed by.

    None for a launch that began from scratch and has none.
    """
    verdicts = [verdict for entry, verdict in events_of(entries, GuardVerdict) if entry.launch == number]
    loaded = next((verdict.loaded for verdict in verdicts if verdict.loaded and verdict.loaded.get("launch") != number), {})
    found: list[AsRecorded] = []
    for at, one, identity in _listed(roots, entries):
        is_origin = bool(loaded) and bool(identity) and identity.get("id") == loaded.get("id")
        if at < step and (identity.get("launch", one.launch) == number or is_origin):
            found.append((at, one, identity))
    problems: list[str] = []
    for at, one, identity in sorted(found, key=lambda row: row[0], reverse=True):
        why = _why_unsound(one, entries)
        if not why:
            return (at, one, identity), tuple(problems)
        problems.append(f"step {at} ({one.path.name}): {why}")
    fresh = verdicts and not loaded and all(verdict.basis in ("fresh", "none", "") for verdict in verdicts)
    if fresh or not verdicts:
        return (0, None, {}), tuple(problems)
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
    found |= OF_A_FORK
    if start.accept_change:
        found["CHRONICLE_ACCEPT_CHANGE"] = start.accept_change
    return found | _resume(checkpoint, step, roots)


def _set_otherwise(environ: Mapping[str, str], start: LaunchStart) -> Iterator[str]:
    """The variables that are set now, and in a fork are not, or otherwise: their recorded values are known."""
    for name, value in sorted(environ.items()):
        is_restored = ALLOWED_VARIABLES.fullmatch(name) and not OF_THE_JOB.fullmatch(name) and not name.startswith("CHRONICLE_")
        if is_restored and start.environment.get(name) != value:
            yield name


def _resume(checkpoint: Checkpoint | None, step: int, roots: Sequence[Path]) -> dict[str, str]:
    if checkpoint is None:
        return {}
    place = checkpoint.path if checkpoint.abandoned is None else roots[0] / checkpoint.path.name
    return {"CHRONICLE_RESUME_FROM": str(place), "CHRONICLE_RESUME_STEP": str(step)}


# ---- the fork ----------------------------------------------------------------------------------------------------------

@contextmanager
def play(
    origin: Origin,
    until: int,
    *,
    sandbox: Path | None = None,
    ranks: Sequence[int],
    code: CodeChange | None = None,
    network: bool = False,
) -> Iterator[Forked]:
    """Run a fork to step `until`; what it left is removed when the block ends.

    It is stopped when every rank of `ranks` has a print of that step. `code`: another state of the repository.
    `network`: it may reach the network. Raises `ChronicleError` when it could not be started.
    """
    if sandbox is not None:
        sandbox.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="chronicle-replay-", dir=sandbox)).resolve()
    try:
        end = _start(origin, until, directory, tuple(ranks), code, network)
        yield Forked(directory=directory / "result", end=end)
    finally:
        shutil.rmtree(directory, onerror=_make_writable)


def _start(
    origin: Origin,
    until: int,
    directory: Path,
    ranks: tuple[int, ...],
    code: CodeChange | None,
    network: bool,
) -> Mapping[str, Any]:
    paths = origin.settings.paths
    run_dir = paths.run_dir if paths.run_dir.is_dir() else paths.run_dir.parent
    anchors = [run_dir, *origin.roots, *(root.parent / "abandoned" for root in origin.roots), origin.cwd]
    anchors += [] if code is None else [Path(code.top)]
    trackers = {name: value.format(sandbox=directory) for name, value in NO_TRACKERS.items()}
    spec = Spec(
        run_dir=str(paths.run_dir.resolve()),
        roots=tuple(map(str, origin.roots)),
        checkpoint="" if origin.checkpoint is None else str(origin.checkpoint.path),
        name="" if origin.checkpoint is None else origin.checkpoint.path.name,
        start=origin.start,
        until=until,
        ranks=ranks,
        command=origin.command,
        cwd=str(origin.cwd),
        environ={**origin.environ, **trackers},
        overlaid=tuple(map(str, minimal(anchors))),
        sandbox=str(directory),
        launch=origin.launch,
        code=code,
        network=network,
        saved={str(one.path): step for step, one, _ in _listed(origin.roots, read_journal(paths).entries)},
    )
    (directory / "spec.json").write_text(json.dumps(asdict(spec)), encoding="utf-8")
    words = [sys.executable, "-m", "chronicle.replay.inside", str(directory / "spec.json")]
    with (directory / "output.log").open("wb") as log:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, check=False)
    if not (directory / "result" / "end.json").exists():
        tail = (directory / "output.log").read_text(errors="replace").strip().splitlines()[-3:]
        raise ChronicleError(f"the replay ended with code {done.returncode}: {' / '.join(tail)}")
    end: Mapping[str, Any] = json.loads((directory / "result" / "end.json").read_text(encoding="utf-8"))
    if "refused" in end:
        raise SandboxRefused(f"the replay was not started: {end['refused']}", end.get("remedy"))
    return end


def _make_writable(function: Callable[..., Any], path: str, _: Any) -> None:
    """The kernel's own directory of an overlay has no permissions."""
    try:
        os.chmod(path, 0o700)
    except OSError:
        return
    shutil.rmtree(path, ignore_errors=True)

"""What a replay will do: which launch again, from which verified checkpoint, with which command and variables, to which step.

What is missing for it is named here, before anything is started. The guard of a plain loop sees that state is taken, and not
where the script writes it (`out/ckpt.pt`): such a state carries an identity that the journal knows, and is looked for by it.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chronicle.checkpoints import KnownStates, find_present_roots, find_verdict, known_states, with_launches
from chronicle.credentials import hidden_arguments
from chronicle.errors import Refusal, UsageProblem
from chronicle.journal import Entry, compute_lineage, read_journal
from chronicle.journal.events import GuardVerdict, LaunchStart, RollbackReceipt, StateSaved, events_of
from chronicle.journal.place import anchors_of
from chronicle.launch.handover import RESUME_FROM, RESUME_STEP
from chronicle.launch.provenance import ALLOWED_VARIABLES
from chronicle.paths import list_launch_numbers
from chronicle.prints.ring import Ring, rings_of
from chronicle.replay.closed import ensure_network_closes
from chronicle.settings import Settings
from rollback.checkpoint.below import checkpoints_below
from rollback.checkpoint.layout import Checkpoint, scan_entries
from rollback.checkpoint.listing import find_format, list_checkpoints, open_checkpoint
from rollback.checks.verify import verify_checkpoint
from rollback.errors import RollbackError, Severity

KEPT_VARIABLES = ("CHRONICLE_BATCH_TEXT",)
OF_A_REPLAY = {"CHRONICLE_GUARD": "warn", "CHRONICLE_PRINTS": "every", "CHRONICLE_REPLAY": "1"}
OF_THE_JOB = re.compile(r"SLURM_\w+|MASTER_(ADDR|PORT)|NODE_RANK|TORCHELASTIC_\w+")
FEW_FILES = 4  # of a script's own directory for each save
PRINTED_BY = "guarded launches under `chronicle run` make them (docs/replay.md); where another launch took the step: --launch N"


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A checkpoint of the run: steps completed, where it is, its identity."""

    step: int
    checkpoint: Checkpoint
    identity: Mapping[str, Any]

    @property
    def launch(self) -> int | None:
        """The launch that saved it."""
        found: int | None = self.identity.get("launch", self.checkpoint.launch)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a replay will do: a launch of the run again, from a checkpoint of it, to a step."""

    settings: Settings
    launch: int
    begin: Saved | None  # None: from the beginning
    command: tuple[str, ...]
    cwd: Path
    environ: Mapping[str, str]
    roots: tuple[Path, ...]
    saves: tuple[Path, ...]  # all checkpoints of the run
    passed_by: tuple[str, ...] = ()  # nearer checkpoints that nobody can begin from, and why; in words
    rings: Mapping[int, Ring] = field(default_factory=dict)  # its prints, by rank
    step: int = 0
    until: int = 0
    network: bool = False  # the script may reach it
    scratch: Path | None = None  # where it writes; None: the temporary directory

    @property
    def start(self) -> int:
        """Steps completed where it begins."""
        return 0 if self.begin is None else self.begin.step

    @property
    def own(self) -> tuple[Path, ...]:
        """What is the run's own: its directory, its roots (but for one that holds the working directory), its checkpoints."""
        return (self.settings.paths.run_dir, *(root for root in self.roots if not is_wide(root, self.cwd)), *self.saves)

    @property
    def words(self) -> str:
        """Where it begins, in a few words."""
        return "its beginning" if self.begin is None else f"step {self.start} (`{self.begin.checkpoint.path}`)"


def plan_replay(
    settings: Settings,
    step: int,
    *,
    launch: int | None = None,
    until: int | None = None,
    command: Sequence[str] = (),
    network: bool = False,
    scratch: Path | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Plan:
    """Plan the replay of a step. Raises `Refusal` or `UsageProblem` with the missing piece; nothing is started."""
    if step < 1:
        raise UsageProblem(f"step is {step}: expected 1 or more", "steps count completed optimizer steps")
    if until is not None and until < step:
        raise UsageProblem(f"--until is {until}: expected {step} or more")
    entries = read_journal(settings.paths).entries
    number, rings, next_print = _launch_of(settings, entries, step, launch)
    start = ensure_replayable(entries, number, command, network=network)
    cwd = Path(start.cwd)
    roots = _roots(settings, entries, cwd)
    saved = list(_saved(roots, entries, cwd))
    begin, passed_by = _nearest(saved, entries, number, step)
    is_of_another = begin is not None and begin.launch != number
    if is_of_another and settings.paths.contract_path.exists() and _is_later_rollback(entries, number):
        raise Refusal(
            f"launch {number} began under another contract than the run has now (a later rollback replaced it)",
            f"replay a step after its first own checkpoint: --launch {number}",
        )
    return Plan(
        settings=settings,
        launch=number,
        begin=begin,
        command=tuple(command) or tuple(start.argv),
        cwd=cwd,
        environ=_environment(environ, start, begin),
        roots=roots,
        saves=tuple(one.checkpoint.path for one in saved),
        passed_by=passed_by,
        rings=rings,
        step=step,
        until=until or next_print,
        network=network,
        scratch=scratch,
    )


def ensure_replayable(
    entries: Sequence[Entry], number: int, command: Sequence[str] = (), *, network: bool = False
) -> LaunchStart:
    """The recorded start of a launch. Raises `Refusal` or `UsageProblem` where it, or `command`, cannot be started here."""
    starts = [start for entry, start in events_of(entries, LaunchStart) if entry.launch == number]
    if not starts:
        raise Refusal(f"the journal has no start of launch {number}: its command is not known")
    if len({start.host for start in starts}) > 1:
        raise Refusal(f"launch {number} ran on {len(starts)} nodes: a replay starts one", "replay a launch of one node")
    if not Path(starts[0].cwd).is_dir():
        raise Refusal(f"the working directory of launch {number}, `{starts[0].cwd}`, is not there any more")
    if hidden := hidden_arguments(tuple(starts[0].argv)) if not command else ():
        again = f"give it again: chronicle replay STEP -- {' '.join(starts[0].argv)}"
        raise UsageProblem(f"the recorded command hides {', '.join(hidden)}", again)
    if not network:
        ensure_network_closes()
    return starts[0]


def _launch_of(
    settings: Settings, entries: Sequence[Entry], step: int, launch: int | None
) -> tuple[int, Mapping[int, Ring], int]:
    """The launch whose step it is, its prints by rank, and the first step from this one on of which all ranks have one.

    Raises `Refusal` or `UsageProblem` where there is none, or more than one.
    """
    known = launch or compute_lineage(entries).owner(step)
    found = []
    for number in [known] if known else list_launch_numbers(settings.paths):
        rings = rings_of(settings.paths.launch_dir(number))
        printed = [set(ring.steps()) for ring in rings.values()]
        common = set.intersection(*printed) if printed else set()
        first = min((one.step for ring in rings.values() for one in ring.prints), default=step)
        if first < step <= max(common, default=0):
            found.append((number, rings, min(one for one in common if one >= step)))
    if not found:
        where = f"launch {known}" if known else f"run {settings.run}"
        raise Refusal(f"{where} has no prints of step {step} or after it: nothing to compare a replay with", PRINTED_BY)
    if len(found) > 1:
        numbers = ", ".join(str(number) for number, _, _ in found)
        raise UsageProblem(
            f"step {step} was taken by launches {numbers}, none of them in the present lineage", "name one: --launch N"
        )
    number, rings, _ = found[0]
    ranks = next(iter(rings.values())).header.get("ranks")
    if ranks != len(rings):
        raise Refusal(f"launch {number} had {ranks} ranks, and prints of {len(rings)} are here")
    return found[0]


def is_wide(root: Path, directory: Path) -> bool:
    """Whether a checkpoint root holds the working directory: then most of what lies in it is no checkpoint."""
    return root.resolve() in (directory.resolve(), *directory.resolve().parents)


def _roots(settings: Settings, entries: Sequence[Entry], cwd: Path) -> tuple[Path, ...]:
    """Where checkpoints lie: as it is told or recorded; else, below `cwd`, where states are that the guard saw being taken."""
    found = [*find_present_roots(settings, entries), *map(Path, anchors_of(settings.paths).roots)]
    if not found:
        wanted = {saved.identity for _, saved in events_of(entries, StateSaved) if saved.identity}
        states = known_states(entries)
        below = checkpoints_below(cwd) if wanted else []
        found = [one.path.parent for one in below if _identity_of(one, states).get("id") in wanted]
    return tuple(dict.fromkeys(_holder_of(Path(os.path.abspath(path))) for path in found))


def _holder_of(root: Path) -> Path:
    """The root, or where it is a checkpoint itself, the directory that holds it and the others."""
    return root.parent if root.is_dir() and find_format(root.name, scan_entries(root, levels=2)) is not None else root


def _saved(roots: Sequence[Path], entries: Sequence[Entry], cwd: Path) -> Iterator[Saved]:
    """The checkpoints of the run. In a root that holds the working directory a script's other files are none."""
    states = known_states(entries)
    listed = {one.path: (root, one) for root in roots for one in with_launches(list_checkpoints(root), entries)}
    for root, one in listed.values():
        identity = _identity_of(one, states)
        at = identity.get("step", one.step)
        if isinstance(at, int) and (identity or not is_wide(root, cwd)):
            yield Saved(step=at, checkpoint=one, identity=identity)


def _identity_of(one: Checkpoint, states: KnownStates) -> Mapping[str, Any]:
    """The identity of a checkpoint, or of the state file in its directory; empty where there is none to be read."""
    own_files = [] if one.single_file or len(one.files) > FEW_FILES else [one.path / file.path for file in one.files]
    for path in (None, *own_files):  # of `step-000008/lit_model.pth` the guard saw the file alone
        try:
            found = states.identity_in(one if path is None else open_checkpoint(path, count_steps=False))
        except (RollbackError, OSError):
            continue
        if found:
            return found
    return {}


def _nearest(
    saved: Sequence[Saved], entries: Sequence[Entry], number: int, step: int
) -> tuple[Saved | None, tuple[str, ...]]:
    """The newest verified checkpoint before `step` that the launch saved or began from, and why newer ones were passed by.

    None for a launch that began from scratch and has none.
    """
    verdicts = [verdict for entry, verdict in events_of(entries, GuardVerdict) if entry.launch == number]
    loaded = next((verdict.loaded for verdict in verdicts if verdict.loaded and verdict.loaded.get("launch") != number), {})
    found = [one for one in saved if one.step < step and (one.launch == number or _is_same(one.identity, loaded))]
    problems: list[str] = []
    for one in sorted(found, key=lambda row: row.step, reverse=True):
        why = _why_unsound(one.checkpoint, entries)
        if not why:
            return one, tuple(problems)
        problems.append(f"step {one.step} ({one.checkpoint.path.name}): {why}")
    fresh = verdicts and not loaded and all(verdict.basis in ("fresh", "none", "") for verdict in verdicts)
    if fresh or not verdicts:
        return None, tuple(problems)
    more = f"; {problems[0]}" if problems else ""
    raise Refusal(
        f"no verified checkpoint of launch {number} before step {step} is left{more}",
        "a checkpoint that the launch saved, or the one that it began from, is needed",
    )


def _is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return bool(one and other) and one.get("id") == other.get("id")


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


def _environment(environ: Mapping[str, str], start: LaunchStart, begin: Saved | None) -> dict[str, str]:
    """Ours, with the recorded variables as they were, and what tells a launch to begin from the checkpoint."""
    found = {name: value for name, value in environ.items() if not name.startswith("CHRONICLE_") or name in KEPT_VARIABLES}
    for name in [name for name in found if is_recorded(name)]:
        del found[name]
    found |= {name: str(value) for name, value in start.environment.items() if not OF_THE_JOB.fullmatch(name)}
    found |= OF_A_REPLAY
    if start.accept_change:
        found["CHRONICLE_ACCEPT_CHANGE"] = start.accept_change
    if begin is not None:
        found |= {RESUME_FROM: str(begin.checkpoint.path), RESUME_STEP: str(begin.step)}
    return found


def is_recorded(name: str) -> bool:
    """Whether the value of a variable is recorded, and set as it was."""
    return ALLOWED_VARIABLES.fullmatch(name) is not None and OF_THE_JOB.fullmatch(name) is None

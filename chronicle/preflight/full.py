"""`chronicle preflight --full`: starts the trainer twice, checks the results, and reuses those that passed before.

The first start fits and saves; the second loads in fresh processes and compares, so that state which exists only in memory
cannot pass. A trainer that does not know the request would begin to train: its first logged step ends the start.
docs/trainer_interface.md describes the trainer's side. Source of PF22: seed 003 (state that does not come back); of PF27:
seed 000 (K = C = S = 0.000 in every row).
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from chronicle.credentials import redact_command
from chronicle.errors import ChronicleError
from chronicle.journal import Entry, read_journal
from chronicle.journal.events import LaunchStart, Preflight, events_of
from chronicle.launch.provenance import describe_launch
from chronicle.paths import RunPaths
from chronicle.preflight.facts import TrainerFacts, declare_plan
from chronicle.preflight.results import CheckResult, CheckVerdict, PreflightFailed
from chronicle.settings import Settings

if TYPE_CHECKING:
    from chronicle.launch.launching import LaunchResult

FULL_VARIABLE = "CHRONICLE_PREFLIGHT"  # "full": this start is for the experiments
DIRECTORY_VARIABLE = "CHRONICLE_PREFLIGHT_DIR"  # shared by both starts: checkpoint and notes of the first
STARTS = ("fit and save", "load in a fresh process and go on")
UNAWARE = "the trainer began to train: it does not know CHRONICLE_PREFLIGHT=full (docs/trainer_interface.md)"
EXPERIMENTS = ("save_round_trip", "fit_losses", "fit_resumed_equal", "micro_batch_difference", "telemetry")
FROM_EXPERIMENTS = ("PF22", "PF25", "PF27", "PF28")


# ---- reuse of earlier experiments ------------------------------------------------------------------------------------


def reuse_experiments(
    facts: TrainerFacts, entries: Sequence[Entry], launch: int | None
) -> tuple[TrainerFacts, int | None]:
    """`facts` with the results of experiments that passed on the same plan, code and environment, and their launch.

    None for the launch where there are none, or where `facts` has results of its own.
    """
    origins = {entry.launch: _code_and_environment(start) for entry, start in events_of(entries, LaunchStart)}
    mine = origins.get(launch)
    if mine is None or any(getattr(facts, name) not in (None, (), {}) for name in EXPERIMENTS):
        return facts, None
    for entry, known in events_of(reversed(entries), Preflight):
        if known.verdict != "passed" or origins.get(entry.launch) != mine:
            continue
        try:
            earlier = TrainerFacts.from_json(known.facts)
        except (ValueError, TypeError):
            continue
        if earlier.save_round_trip is not None and declare_plan(earlier) == declare_plan(facts):
            return replace(facts, **{name: getattr(earlier, name) for name in EXPERIMENTS}), entry.launch
    return facts, None


def mark_reused(result: CheckResult, launch: int | None) -> CheckResult:
    """The result of a check, naming the launch whose experiments it rests on; None: this one."""
    if launch is None or result.check not in FROM_EXPERIMENTS or result.verdict is CheckVerdict.UNKNOWN:
        return result
    return replace(result, read=f"{result.read}; launch {launch}: same plan, code and environment")


def find_reusable(entries: Sequence[Entry], command: tuple[str, ...]) -> Entry | None:
    """The newest experiments that passed with this command, code and environment; None: they must be repeated."""
    origin = _code_and_environment(LaunchStart.from_json(describe_launch(command, Path.cwd(), os.environ)))
    words = redact_command(command)
    same = set()
    for entry, start in events_of(entries, LaunchStart):
        if origin is not None and list(start.argv) == words and _code_and_environment(start) == origin:
            same.add(entry.launch)
    found = None
    for entry, known in events_of(entries, Preflight):
        if entry.launch in same and known.verdict == "passed" and "save_round_trip" in known.facts:
            found = entry
    return found


def _code_and_environment(start: LaunchStart) -> tuple[str, ...] | None:
    """Digests of code and packages of a launch; None where one is unknown, because unknown equals nothing."""
    if not start.git_commit or not start.env_digest:
        return None
    return start.git_commit, start.git_dirty_digest or "", start.env_digest


# ---- the two starts --------------------------------------------------------------------------------------------------


def run_experiments(settings: Settings, command: tuple[str, ...], *, grace_seconds: float) -> int:
    """Start the trainer twice; returns the number of the launch that recorded the results.

    Raises `ChronicleError` when a start fails or no results were recorded. The shared directory is removed afterwards.
    """
    settings.paths.run_dir.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix=".preflight-", dir=settings.paths.run_dir)).resolve()
    try:
        for what in STARTS:
            end = _start(settings, command, directory, what, grace_seconds)
            if end.exit_code == PreflightFailed.exit_code:
                return end.launch  # the failed checks are in the journal
            if end.exit_code:
                reason = end.data.get("proposal") or f"the trainer ended with code {end.exit_code}, see launch {end.launch}"
                raise ChronicleError(
                    f"preflight --full, {what}: {reason}",
                    "`chronicle preflight` without --full does not start the trainer",
                )
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    recorded = events_of(read_journal(settings.paths).entries, Preflight)
    if not any(entry.launch == end.launch and "save_round_trip" in known.facts for entry, known in recorded):
        raise ChronicleError(
            "preflight --full: the trainer ended with code 0 but reported no results of its experiments",
            "report them with `check_before_first_step`, see docs/trainer_interface.md",
        )
    return end.launch


def _start(settings: Settings, command: tuple[str, ...], directory: Path, what: str, grace_seconds: float) -> LaunchResult:
    from chronicle.launch.launching import LaunchRequest, launch  # the ranks import this module, and do not need it

    request = LaunchRequest(
        command=command,
        paths=settings.paths,
        checkpoints_dir=settings.checkpoints_dir,
        cwd=Path.cwd(),
        environ=dict(os.environ) | {FULL_VARIABLE: "full", DIRECTORY_VARIABLE: str(directory)},
        grace_seconds=grace_seconds,
        stop_on_proposal=True,
        recorded={"purpose": "preflight", "part": what},
    )
    return launch(request, live_watch=NoStepAllowed)


class StepSeen(NamedTuple):
    """The event of `NoStepAllowed`; its tier asks for a stop."""

    title: str = UNAWARE
    tier: str = "propose"


class NoStepAllowed:
    """A live watch that asks for a stop as soon as this launch logs a step of the run."""

    def __init__(self, paths: RunPaths, number: int, *_: Any, **__: Any) -> None:
        self._metrics = paths.metrics_path(number)

    def poll(self) -> Iterable[StepSeen]:
        """One event as soon as the log has content."""
        return (StepSeen(),) if self._metrics.exists() and self._metrics.stat().st_size else ()

    finish = poll

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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chronicle.credentials import redact_command
from chronicle.errors import ChronicleError
from chronicle.journal import Entry, read_journal
from chronicle.journal.events import LaunchStart, Preflight, events_of
from chronicle.launch.provenance import describe_launch
from chronicle.preflight.facts import Baseline, TrainerFacts, declare_plan
from chronicle.preflight.results import CheckAnswer, CheckResult, CheckVerdict, PreflightFailed
from chronicle.settings import Settings

if TYPE_CHECKING:
    from chronicle.launch.launching import LaunchResult

FULL_VARIABLE = "CHRONICLE_PREFLIGHT"  # "full": this start is for the experiments
DIRECTORY_VARIABLE = "CHRONICLE_PREFLIGHT_DIR"  # shared by both starts: checkpoint and notes of the first
STARTS = ("fit and save", "load in a fresh process and go on")
UNAWARE = "the trainer began to train: it does not know CHRONICLE_PREFLIGHT=full (docs/trainer_interface.md)"
EXPERIMENTS = ("save_round_trip", "fit_losses", "fit_resumed_equal", "micro_batch_difference", "telemetry")
FROM_EXPERIMENTS = ("PF22", "PF25", "PF27", "PF28")
DIFFERENCE = 1e-3  # relative
MIN_FALL = 0.02  # of the loss, relative


# ---- checks of the results -------------------------------------------------------------------------------------------


def check_round_trip(facts: TrainerFacts, expected: Baseline) -> CheckResult:
    """PF22: what is saved comes back equal in a fresh process."""
    answer = CheckAnswer("PF22", "save round trip")
    if facts.save_round_trip is None:
        return answer.unknown("this check needs --full")
    if facts.save_round_trip:
        return answer.failed(f"`{facts.save_round_trip}` came back different", "save, load, compare", "save and load all of it")
    return answer.passed("everything came back equal", "save, load, compare")


def check_fit(facts: TrainerFacts, expected: Baseline) -> CheckResult:
    """PF25: a short fit on fixed data lowers the loss, and a fit resumed half-way gives the same losses."""
    answer = CheckAnswer("PF25", "sanity fit")
    losses = facts.fit_losses
    if len(losses) < 2:
        return answer.unknown("this check needs --full")
    fall = (losses[0] - min(losses)) / abs(losses[0]) if losses[0] else 0.0
    read = f"{len(losses)} updates, loss {losses[0]:.4g} → {losses[-1]:.4g}"
    if fall < MIN_FALL:
        return answer.failed(f"the loss falls by {fall:.1%}", read, "check gradients, LR and labels")
    if facts.fit_resumed_equal is False:
        return answer.failed(
            "the resumed half differs from the uninterrupted one",
            read,
            "find the state that the trainer does not save or load",
        )
    return answer.passed(f"the loss falls by {fall:.0%}", read)


def check_micro_batches(facts: TrainerFacts, expected: Baseline) -> CheckResult:
    """PF28: accumulation gives the loss of the whole batch."""
    answer = CheckAnswer("PF28", "micro-batch independence")
    difference = facts.micro_batch_difference
    if difference is None:
        return answer.unknown("this check needs --full")
    read = f"relative difference {difference:.2g}"
    if difference > DIFFERENCE:
        return answer.failed("the parts do not add up to the batch", read, "scale by tokens, not by parts")
    return answer.passed("the parts add up to the batch", read)


def check_telemetry(facts: TrainerFacts, expected: Baseline) -> CheckResult:
    """PF27: every telemetry channel changes over several steps."""
    answer = CheckAnswer("PF27", "telemetry alive")
    known = {name: series for name, series in facts.telemetry.items() if len(series) > 1}
    if not known:
        return answer.unknown("no telemetry over several steps")
    dead = sorted(name for name, series in known.items() if max(series) == min(series))
    if dead:
        rows = len(known[dead[0]])
        text = "=".join(dead) + f"={known[dead[0]][0]:.3f} in {rows} of {rows} rows"
        return answer.warned(text, f"{len(known)} channels", "it measures nothing: fix it or remove it")
    return answer.passed(f"{len(known)} channels change", f"{len(known)} channels")


# ---- reuse of earlier experiments ------------------------------------------------------------------------------------


def reuse_experiments(
    facts: TrainerFacts, entries: Sequence[Entry], launch: int | None
) -> tuple[TrainerFacts, int | None] | None:
    """`facts` with the results of experiments that passed on the same plan, code and environment, and their launch.

    None when there are none, or when `facts` has results of its own.
    """
    if any(getattr(facts, name) not in (None, (), {}) for name in EXPERIMENTS):
        return None
    origins = {entry.launch: _code_and_environment(start) for entry, start in events_of(entries, LaunchStart)}
    mine = origins.get(launch)
    if mine is None:
        return None
    for entry, known in events_of(reversed(entries), Preflight):
        if known.verdict != "passed" or origins.get(entry.launch) != mine:
            continue
        try:
            earlier = TrainerFacts.from_json(known.facts)
        except (ValueError, TypeError):
            continue
        if earlier.save_round_trip is not None and declare_plan(earlier) == declare_plan(facts):
            return replace(facts, **{name: getattr(earlier, name) for name in EXPERIMENTS}), entry.launch
    return None


def mark_reused(result: CheckResult, launch: int | None) -> CheckResult:
    """The result of a check, naming the launch whose experiments it rests on."""
    if result.check not in FROM_EXPERIMENTS or result.verdict is CheckVerdict.UNKNOWN:
        return result
    return replace(result, read=f"{result.read}; launch {launch}: same plan, code and environment")


def find_reusable(entries: Sequence[Entry], command: tuple[str, ...]) -> Entry | None:
    """The newest experiments that passed with this command, code and environment; None: they must be repeated."""
    origin = _code_and_environment(LaunchStart.from_json(describe_launch(command, Path.cwd(), os.environ)))
    same = {
        entry.launch
        for entry, start in events_of(entries, LaunchStart)
        if origin is not None and list(start.argv) == redact_command(command) and _code_and_environment(start) == origin
    }
    passed = (
        entry
        for entry, known in events_of(entries, Preflight)
        if entry.launch in same and known.verdict == "passed" and "save_round_trip" in known.facts
    )
    return max(passed, key=lambda entry: entry.id, default=None)


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
    return launch(request, live_watch=_watch)


@dataclass(frozen=True, slots=True)
class StepSeen:
    """The event of `NoStepAllowed`; its tier asks for a stop."""

    title: str = UNAWARE
    tier: str = "propose"


class NoStepAllowed:
    """A live watch that asks for a stop as soon as this launch logs a step of the run."""

    def __init__(self, metrics: Path) -> None:
        self._metrics = metrics

    def poll(self) -> Iterable[StepSeen]:
        """One event as soon as the log has content."""
        return (StepSeen(),) if self._metrics.exists() and self._metrics.stat().st_size else ()

    finish = poll


def _watch(paths: Any, number: int, *words: Any, **options: Any) -> NoStepAllowed:
    return NoStepAllowed(paths.metrics_path(number))

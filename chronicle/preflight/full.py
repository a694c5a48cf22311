"""`chronicle preflight --full`: start the trainer twice for its experiments, in a directory that is removed afterwards.

The first start fits and saves, the second loads in fresh processes and compares: what is only kept in memory cannot pass.
A trainer that does not know the request would begin to train: its first logged step ends the start.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chronicle.errors import ChronicleError
from chronicle.journal import Entry, read_journal
from chronicle.launch.launching import LaunchRequest, LaunchResult, launch
from chronicle.launch.provenance import describe_launch, redact_command
from chronicle.preflight.gate import FULL_VARIABLE, PreflightFailed, code_and_environment
from chronicle.settings import Settings

__all__ = ["find_reusable", "run_experiments"]

DIRECTORY_VARIABLE = "CHRONICLE_PREFLIGHT_DIR"  # shared by both starts: checkpoint and notes of the first
STARTS = ("fit and save", "load in a fresh process and go on")
UNAWARE = "the trainer began to train: it does not know CHRONICLE_PREFLIGHT=full (docs/trainer_interface.md)"


@dataclass(frozen=True, slots=True)
class StepSeen:
    """What the watch reports: reason enough to stop."""

    title: str = UNAWARE
    tier: str = "propose"


class NoStepAllowed:
    """A live watch that asks for a stop as soon as this launch logs a step of the run."""

    def __init__(self, metrics: Path) -> None:
        self._metrics = metrics

    def poll(self) -> Iterable[StepSeen]:
        """One event once there is a line."""
        return (StepSeen(),) if self._metrics.exists() and self._metrics.stat().st_size else ()

    finish = poll


def find_reusable(entries: Iterable[Entry], command: tuple[str, ...]) -> Entry | None:
    """The newest experiments that passed under this very command, code and environment; None: make them again."""
    now = describe_launch(command, Path.cwd(), os.environ)
    origin = code_and_environment(now)
    same = {
        entry.launch
        for entry in entries
        if entry.kind == "launch.start"
        and origin is not None
        and entry.data.get("argv") == redact_command(command)
        and code_and_environment(entry.data) == origin
    }
    passed = (
        entry
        for entry in entries
        if entry.kind == "preflight"
        and entry.launch in same
        and entry.data.get("verdict") == "passed"
        and _made_experiments(entry.data.get("facts"))
    )
    return max(passed, key=lambda entry: entry.id, default=None)


def run_experiments(settings: Settings, command: tuple[str, ...], *, grace_seconds: float) -> int:
    """Both starts; returns the number of the launch that wrote the facts. Raises ChronicleError when none were written."""
    settings.paths.run_dir.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix=".preflight-", dir=settings.paths.run_dir)).resolve()
    try:
        for what in STARTS:
            end = _start(settings, command, directory, what, grace_seconds)
            if end.exit_code == PreflightFailed.exit_code:
                return end.launch  # the failed checks are in the journal
            if end.exit_code:
                reason = end.data.get("proposal") or f"the trainer ended with code {end.exit_code}, see launch {end.launch}"
                raise ChronicleError(f"preflight --full, {what}: {reason}", "`chronicle preflight` alone needs no such start")
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    said = [one for one in read_journal(settings.paths).of_kind("preflight") if one.launch == end.launch]
    if not any(_made_experiments(one.data.get("facts")) for one in said):
        raise ChronicleError(
            "preflight --full: the trainer ended well and said nothing about its experiments",
            "it gives them with `check_before_first_step`, see docs/trainer_interface.md",
        )
    return end.launch


def _start(settings: Settings, command: tuple[str, ...], directory: Path, what: str, grace_seconds: float) -> LaunchResult:
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


def _watch(paths: Any, number: int, *words: Any, **options: Any) -> NoStepAllowed:
    return NoStepAllowed(paths.metrics_path(number))


def _made_experiments(facts: object) -> bool:
    return isinstance(facts, Mapping) and "save_round_trip" in facts

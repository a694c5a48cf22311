"""Play one cause: a launch that saves, the accident, a launch that resumes; and say who noticed, when."""

import contextlib
import importlib
import io
import json
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from benchmarks.planted_bugs.plan import Acts, Cause, Plan, Row
from chronicle import ResumeRefused
from chronicle.watch.log_checks import check_log

__all__ = ["RIGS", "Outcome", "Result", "play"]

RIGS = {
    "accelerate": "rig_accelerate",
    "ddp": "rig_accelerate",
    "zero": "rig_accelerate",
    "torch": "rig_torch",
    "transformers": "rig_transformers",
    "lightning": "rig_lightning",
    "deepspeed": "rig_deepspeed",
}
SAVED_AT = 12
WORKPLACE = Path(tempfile.gettempdir())


class Outcome(StrEnum):
    """Who stopped it."""

    BEFORE = "before step 1"
    ACTING = "at a later step"
    FRAMEWORK = "framework error"
    SAID = "noted, with both values"
    LOG = "log only"
    MISSED = "missed"
    HEALTHY = "passed"
    FALSE_ALARM = "FALSE ALARM"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One cause, with or without the guard."""

    rig: str
    name: str
    source: str
    acts: str
    guarded: bool
    outcome: Outcome
    step: int = 0
    detail: str = ""

    def to_line(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_line(cls, line: str) -> "Result":
        record = json.loads(line)
        return cls(**{**record, "outcome": Outcome(record["outcome"])})


def play(
    cause: Cause, *, guarded: bool, folder: Path, rank: int = 0, barrier: Callable[[], object] = lambda: None
) -> Result:
    """One real accident in `folder` (the same on all ranks); what a guard or framework raises is the result."""
    rig: Any = importlib.import_module(f"benchmarks.planted_bugs.{RIGS[cause.rig]}")
    plan = Plan()
    cause.plant(plan)
    if cause.rig == "zero":
        plan.first.setdefault("zero", 1)
    run_dir = folder / "logs" / "run" if guarded else None
    rows: list[Row] = []
    said = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stderr(said):
        warnings.simplefilter("ignore")
        checkpoint, before = rig.first(folder, run_dir, plan)
        barrier()
        if rank == 0:
            for hook in plan.files:
                hook(checkpoint)
            if plan.moved:
                _move(checkpoint, folder)
        barrier()
        checkpoint = _moved(checkpoint, folder) if plan.moved else checkpoint
        outcome, detail = _resume(rig, checkpoint, run_dir, plan, rows)
    if outcome is None and cause.acts is Acts.ALLOWED and (noted := _noted(said.getvalue())):
        outcome, detail = Outcome.SAID, noted
    if outcome is None:
        outcome, detail = _look_at_log(before, rows)
    return Result(
        rig=cause.rig,
        name=cause.name,
        source=cause.source,
        acts=str(cause.acts),
        guarded=guarded,
        outcome=outcome,
        step=len(rows) + 1,
        detail=detail[:160],
    )


def _noted(text: str) -> str:
    """What the guard named on stderr of the differences that may be on purpose; "" when it said nothing."""
    markers = tuple(f"chronicle guard: noted: {name}: " for name in ("newest checkpoint", "schedule"))
    return next((line.partition("noted: ")[2] for line in text.splitlines() if line.startswith(markers)), "")


def _move(checkpoint: Path, folder: Path) -> None:
    """Files move alone, a directory with everything beside it (DeepSpeed's `latest`)."""
    target = _moved(checkpoint, folder)
    if checkpoint.is_dir():
        checkpoint.parent.rename(target.parent)
    else:
        target.parent.mkdir()
        checkpoint.rename(target)


def _moved(checkpoint: Path, folder: Path) -> Path:
    return folder / "moved" / checkpoint.name


def _resume(
    rig: Any, checkpoint: Path, run_dir: Path | None, plan: Plan, rows: list[Row]
) -> tuple[Outcome | None, str]:
    try:
        rig.resume(checkpoint, run_dir, plan, rows)
    except ResumeRefused as refusal:
        return (Outcome.ACTING if rows else Outcome.BEFORE), f"{refusal.checks[0].code} {refusal.checks[0].name}"
    except Exception as problem:  # noqa: BLE001 whatever the framework raises is what is measured
        if rows:
            return None, ""
        return Outcome.FRAMEWORK, f"{type(problem).__name__}: {problem}".splitlines()[0]
    return None, ""


def _look_at_log(before: Iterable[Row], rows: list[Row]) -> tuple[Outcome, str]:
    checks = check_log([row for row in before if row[0] <= SAVED_AT], rows, resume_step=SAVED_AT)
    return (Outcome.LOG, checks[0].name) if checks else (Outcome.MISSED, "")


@contextlib.contextmanager
def workplace() -> Any:
    """A directory for one accident, removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="planted-", dir=WORKPLACE))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def say(text: str) -> None:
    """Progress, for people."""
    print(text, file=sys.stderr, flush=True)

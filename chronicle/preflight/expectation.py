"""What a launch is held against: the declared plan of the run, numbers somebody claimed, and the limits of the place.

The plan is the journal's newest `plan` entry with facts: the first launch declares it, `--accept-change "reason"` replaces
it. Pure: entries in, values out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from chronicle.journal import Entry
from chronicle.preflight.facts import TrainerFacts

__all__ = ["PLAN_KEYS", "SIGNAL_LEAD_VARIABLE", "Expectation", "declare_plan", "find_plan", "read_seconds"]

SIGNAL_LEAD_VARIABLE = "CHRONICLE_SIGNAL_LEAD"  # seconds between a scheduler's warning and its KILL; the batch script sets it

# What must not change in silence between launches, in the order it is reported
PLAN_KEYS = ("params", "world_size", "dataset", "dataset_bytes", "precision", "wrapper", "planned_steps", "config")


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """Everything a check may compare with. None or empty: nothing was declared, claimed or measured."""

    plan: Mapping[str, Any] = field(default_factory=dict)  # as `declare_plan` returns it
    claimed_params: float | None = None
    claimed_devices: int | None = None
    claimed_wrapper: str | None = None
    claimed_dataset_bytes: int | None = None
    accepted_change: str | None = None  # the reason given with --accept-change
    grace_seconds: float | None = None  # launcher's KILL after a signal
    signal_lead_seconds: float | None = None  # a scheduler's warning before its own KILL
    free_bytes: int | None = None

    @property
    def binding_plan(self) -> Mapping[str, Any]:
        """What single checks hold the launch against: nothing once the change from the plan was accepted as a whole."""
        return {} if self.accepted_change else self.plan


def declare_plan(facts: TrainerFacts) -> dict[str, Any]:
    """The part of the facts that later launches must repeat; what is unknown is not declared."""
    plan = {
        "params": facts.params_logical if facts.params_logical is not None else facts.params_counted,
        "world_size": facts.world_size,
        "dataset": facts.dataset,
        "dataset_bytes": facts.dataset_bytes,
        "precision": facts.precision,
        "wrapper": facts.wrapper,
        "planned_steps": facts.planned_steps,
        "config": dict(facts.config) or None,
    }
    return {key: value for key, value in plan.items() if value is not None}


def read_seconds(environ: Mapping[str, str], name: str) -> float | None:
    """A duration out of the environment; None where it is not set or no number."""
    text = environ.get(name, "")
    return float(text) if text.replace(".", "", 1).isdigit() else None


def find_plan(entries: Iterable[Entry]) -> Entry | None:
    """The newest entry that declares a plan with facts."""
    newest = None
    for entry in entries:
        if entry.kind == "plan" and isinstance(entry.data.get("declared"), Mapping):
            newest = entry
    return newest

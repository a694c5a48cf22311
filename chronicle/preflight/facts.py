"""`TrainerFacts`: what a trainer reports before its first step, and the `Baseline` it is compared with.

Every field of the facts may stay None; its check then answers `unknown`.

A trainer fills what it has on one rank, after gathering `ranks`, and calls `check_before_first_step(facts)`:

    facts = TrainerFacts(config={"d_model": 1792, "layers": 20}, params_logical=n, params_counted=n, ranks=(…),
                         num_data_shards=64, num_workers=4, planned_steps=3000, learning_rates=lrs, …)

Counts are elements, lengths are samples, LRs are per optimizer update. The plan is the journal's newest `plan` entry: the
first launch declares it, `--accept-change "reason"` replaces it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from chronicle.journal import Entry, compute_lineage
from chronicle.journal.events import PlanDeclared, events_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """One rank, described by itself. `device` is an id that two ranks share only when they share the device."""

    rank: int
    host: str
    pid: int
    device: str
    params_local: int | None = None
    first_batch_digest: str | None = None
    data_rank: int | None = None  # ranks of one model replica share it; None: every rank reads its own data


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerFacts:
    """Everything the checks can read about a run that is about to start."""

    config: Mapping[str, Any] = field(default_factory=dict)  # what defines model, data and schedule: JSON values
    # counts
    params_logical: int | None = None  # closed formula over the configuration
    params_counted: int | None = None  # before wrapping, each storage once
    # topology, measured
    ranks: tuple[RankFacts, ...] = ()
    world_sizes_seen: Mapping[str, int] = field(default_factory=dict)  # launcher, torch, accelerate, deepspeed
    wrapper: str | None = None
    precision: str | None = None
    # data
    dataset: str | None = None
    dataset_bytes: int | None = None
    num_samples: int | None = None
    pad_fraction: float | None = None
    num_data_shards: int | None = None
    num_workers: int | None = None  # per rank
    data_resampled: bool | None = None
    data_addressable: bool | None = None  # any reader reads any sample by its number: shards need no readers of their own
    masked_fractions: tuple[float, ...] = ()  # labels left out of the loss, per collated batch
    # schedule
    planned_steps: int | None = None  # optimizer updates
    scheduler: str | None = None
    scheduler_horizon: int | None = None  # scheduler steps until its end
    scheduler_steps_per_update: float | None = None
    learning_rates: tuple[float, ...] = ()  # predicted for each update from here on, first group
    accumulation: int | None = None
    # saving
    checkpoint_bytes: int | None = None
    checkpoints_kept: int | None = None
    save_seconds: float | None = None

    @property
    def world_size(self) -> int | None:
        """Ranks that reported themselves."""
        return len(self.ranks) or None

    def to_json(self) -> dict[str, Any]:
        """The JSON form; empty fields are left out."""
        return {key: value for key, value in asdict(self).items() if value not in (None, (), {}, [])}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TrainerFacts:
        """Parse the JSON form. What this version does not know is left out: its checks say that it was not reported."""
        values = _known(cls, data)
        values["ranks"] = tuple(RankFacts(**_known(RankFacts, rank)) for rank in data.get("ranks", ()))
        return cls(**values)


def _known(kind: type[TrainerFacts | RankFacts], data: Mapping[str, Any]) -> dict[str, Any]:
    names = {one.name for one in fields(kind)}
    return {key: tuple(value) if isinstance(value, list) else value for key, value in dict(data).items() if key in names}


# ---- baseline: the declared plan, claimed numbers and the limits of the machine --------------------------------------

SIGNAL_LEAD_VARIABLE = "CHRONICLE_SIGNAL_LEAD"  # seconds between a scheduler's warning and its KILL; the batch script sets it

# What must not change silently between launches, in the order of the report
PLAN_KEYS = ("params", "world_size", "dataset", "dataset_bytes", "precision", "wrapper", "planned_steps", "config")


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """Everything a check may compare with. None or empty: nothing was declared, claimed or measured."""

    plan: Mapping[str, Any] = field(default_factory=dict)  # as `declare_plan` returns it
    claimed_params: float | None = None
    claimed_devices: int | None = None
    accepted_change: str | None = None  # the reason given with --accept-change
    grace_seconds: float | None = None  # launcher's KILL after a signal
    signal_lead_seconds: float | None = None  # a scheduler's warning before its own KILL
    free_bytes: int | None = None

    @property
    def binding_plan(self) -> Mapping[str, Any]:
        """The plan that single checks compare with: empty once a change of the plan was accepted."""
        return {} if self.accepted_change else self.plan

    @property
    def seconds_to_kill(self) -> float | None:
        """Between a signal and the KILL that follows it; None where no limit is known."""
        known = [seconds for seconds in (self.grace_seconds, self.signal_lead_seconds) if seconds is not None]
        return min(known, default=None)


def declare_plan(facts: TrainerFacts) -> dict[str, Any]:
    """The part of the facts that later launches must repeat; unknown values are not declared."""
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
    """A duration from the environment; None when it is not set or no number."""
    text = environ.get(name, "")
    return float(text) if text.replace(".", "", 1).isdigit() else None


def find_plan(entries: Sequence[Entry], start_step: int | None = None) -> PlanDeclared | None:
    """The plan that was declared last; None before the first declaration.

    `start_step`: of the launch that is to be compared, in steps completed. What a training itself changed on its way
    (a growth) after that step, or on a way that was abandoned, is not its plan yet.
    """
    newest, lineage = None, None
    for entry, plan in events_of(entries, PlanDeclared):
        if entry.step is not None and start_step is not None:
            lineage = lineage or compute_lineage(entries)
            if entry.step > start_step or lineage.owner(entry.step) not in (None, entry.launch):
                continue
        newest = plan if plan.declared else newest
    return newest

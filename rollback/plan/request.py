"""The request of a rollback, and the values that a plan consists of. Each has a JSON form.

A request may hold options that only the next launch can act on (LR warm-up, skipped batches, another data order).
These options need runtime support: a plan is refused unless the checkpoint's manifest or the journal lists them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from rollback.errors import PlanRefused
from rollback.lr.oracle import LrTable
from rollback.records import record_of


class Source(StrEnum):
    """Where the LRs of the next steps are known from."""

    COMPUTED = "computed"  # from scheduler state and parameter groups
    STORED = "stored"  # recorded by the guard when the checkpoint was saved
    UNKNOWN = "unknown"  # from no file; the ratio is proved nevertheless


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackRequest:
    """The options of `chronicle rollback`: the target step and what to change. `sets` maps fields to new values."""

    step: int
    launch: int | None = None
    lr_scale: float | None = None
    lr: float | None = None
    sets: Mapping[str, float | int] = field(default_factory=dict)
    keep_later: bool = False
    warmup_steps: int = 0
    skip_batches: int = 0
    reshuffle: bool = False
    accept_change: tuple[str, ...] = ()
    accept_unproved: str = ""  # why an LR edit is made although its effect is not proved
    lr_in: tuple[str, ...] = ()  # FILE:key.path of each number from which the next launch takes its LR, by a person's word

    def __post_init__(self) -> None:
        if self.lr_scale is not None and self.lr is not None:
            raise PlanRefused("--lr-scale and --lr are both given: expected one of them", remedy="drop one of them")
        for name, value in (("--lr-scale", self.lr_scale), ("--lr", self.lr)):
            if value is not None and not 0.0 < value < float("inf"):
                raise PlanRefused(f"{name} {value!r}: expected a positive number")
        if self.lr_in and self.lr_scale is None and self.lr is None:
            raise PlanRefused("--lr-in names where the next launch takes its LR from: expected --lr-scale or --lr as well")
        for name in OF_BETAS.keys() & self.sets.keys():
            if not 0.0 <= self.sets[name] < 1.0:
                raise PlanRefused(f"--set {name}={self.sets[name]!r}: expected a number from 0 to below 1")
        if self.warmup_steps < 0 or self.skip_batches < 0:
            raise PlanRefused("--warmup and --skip-batches: expected 0 or more")

    @property
    def asks_next_launch(self) -> bool:
        """Whether the request has options that only change the contract of the next launch."""
        return bool(self.warmup_steps or self.skip_batches or self.reshuffle or self.accept_change)

    def to_json(self) -> dict[str, Any]:
        """The form in a written plan."""
        return record_of(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> RollbackRequest:
        """The request of a written plan, all types checked; raises `PlanRefused` when it is not a request."""
        try:
            lists = {name: tuple(record.get(name, ())) for name in ("accept_change", "lr_in")}
            request = cls(**{**record, **lists})
        except (TypeError, AttributeError) as problem:
            raise PlanRefused(
                f"the plan's request cannot be read: {problem}", "make a new plan with `chronicle rollback`"
            ) from None
        for name, kinds in _KINDS.items():
            value = getattr(request, name)
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                expected = " or ".join("nothing" if kind is type(None) else kind.__name__ for kind in kinds)
                raise PlanRefused(
                    f"the plan's request has {name} {str(value)[:80]!r}: expected {expected}",
                    "make a new plan with `chronicle rollback`",
                )
        inner = (*request.sets.values(), *([] if request.launch is None else [request.launch]))
        texts = (*request.sets, *request.accept_change, *request.lr_in)
        if not all(isinstance(v, int | float) for v in inner) or not all(isinstance(t, str) for t in texts):
            raise PlanRefused(
                "the plan's request holds a wrong type: expected numbers and text",
                "make a new plan with `chronicle rollback`",
            )
        return request


_KINDS: Mapping[str, tuple[type, ...]] = {
    "step": (int,),
    "launch": (int, type(None)),
    "lr_scale": (int, float, type(None)),
    "lr": (int, float, type(None)),
    "sets": (Mapping,),
    "keep_later": (bool,),
    "warmup_steps": (int,),
    "skip_batches": (int,),
    "reshuffle": (bool,),
    "accept_unproved": (str,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """A file that the plan was made from; `fingerprint` is its sha256, or size, time and inode of a large one."""

    path: str
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Later:
    """A later checkpoint of the root, which will be moved to `abandoned/`."""

    name: str
    step: int
    launch: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PointerEdit:
    """New content of a pointer: a small text file such as DeepSpeed's `latest`, or a symbolic link."""

    path: str
    before: str
    after: str
    is_link: bool = False

    def reversed(self) -> PointerEdit:
        """The edit that takes it back."""
        return replace(self, before=self.after, after=self.before)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedLrs:
    """The LRs that the next launch will have: per parameter group after the load, and for the next steps.

    `next_lrs` has one row per step, the first for the step right after the resume; None with a `reason` when unknown.
    `ratio` is the factor on every LR of the checkpoint; None when single fields were set to absolute values. `unproved`:
    what else may decide the LR of the next launch; its guard then holds the LR for the first steps. `assumed`: what the
    effect rests on and nothing has shown; the first LRs that the next launch logs, or its guard, settle it.
    """

    lrs: tuple[float, ...]
    initial_lrs: tuple[float | None, ...]
    ratio: float | None
    next_lrs: LrTable | None
    source: Source
    reason: str = ""
    unproved: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What the rollback loses: steps of the present lineage after the target, and hours where the pace is known."""

    steps: int | None = None
    hours: float | None = None


# --- Options that need runtime support

WARMUP, SKIP, RESHUFFLE = "warmup", "skip", "reshuffle"
OF_BETAS = {"beta1": 0, "beta2": 1}  # of `--set`: the parts of the betas of every parameter group
HONOURED = (WARMUP, SKIP, RESHUFFLE)

# What to do where a trainer does not support an option; "" is for scripts of an unknown writer
_OWN: Mapping[str, Mapping[str, str]] = {
    "transformers": {
        WARMUP: "no option of the Trainer warms up again after a resume: scale with --lr-scale instead",
        SKIP: "the Trainer skips only the data it was trained on: leave the batches out of `train_dataset` "
        "(`ignore_data_skip` would start the data again)",
        RESHUFFLE: "set another `data_seed` and `ignore_data_skip` for the Trainer",
    },
    "accelerate": {
        WARMUP: "let the script's own scheduler warm up again, or scale with --lr-scale",
        SKIP: "call `accelerator.skip_first_batches(loader, N)` in the script",
        RESHUFFLE: "call `set_seed` with another seed before the loaders are prepared",
    },
    "deepspeed": {
        WARMUP: "raise `scheduler.params.warmup_num_steps` in the DeepSpeed config beyond this step, or scale with --lr-scale",
        SKIP: "advance the script's own data iterator by N batches after `load_checkpoint`",
        RESHUFFLE: "give the script's own data loader another seed",
    },
    "lightning": {
        WARMUP: "let `configure_optimizers` warm up again, or scale with --lr-scale",
        SKIP: "leave the batches out in `train_dataloader` (Lightning itself has no option for it)",
        RESHUFFLE: "call `seed_everything` with another seed",
    },
    "": {
        WARMUP: "let the script's own scheduler warm up again, or scale with --lr-scale",
        SKIP: "advance the script's own data iterator by N batches after the load",
        RESHUFFLE: "give the script's own data loader another seed",
    },
}


def refuse_unhonoured(request: RollbackRequest, honours: frozenset[str], format_name: str) -> None:
    """Raise `PlanRefused` for the first requested option that the run does not support at run time."""
    asked = {
        WARMUP: ("--warmup", request.warmup_steps),
        SKIP: ("--skip-batches", request.skip_batches),
        RESHUFFLE: ("--reshuffle", request.reshuffle),
    }
    for name, (option, value) in asked.items():
        if value and name not in honours:
            raise PlanRefused(
                f"{option} needs runtime support: expected `{name}` in the `honours` of the run that saved this checkpoint",
                remedy=f"{own_option(name, format_name)}; or implement it in the script and declare it with "
                f'`chronicle.guard(…, honours=("{name}",))`',
            )


def own_option(name: str, format_name: str) -> str:
    """How to get the same effect with the trainer's own options."""
    writer = next((known for known in ("transformers", "lightning", "deepspeed", "accelerate") if known in format_name), "")
    if format_name.startswith("accelerate"):
        writer = "accelerate"
    return _OWN[writer][name]

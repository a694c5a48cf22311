"""What a rollback is asked to do, and the values that a plan is made of. Each has a JSON form.

A request may hold options that only the next launch can act on (LR warm-up, skipped batches, another data order).
These options need runtime support: a plan is refused unless the checkpoint's manifest or the journal lists them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from rollback.errors import PlanRefused
from rollback.lr.oracle import LrTable


class Source(StrEnum):
    """Where the LRs of the coming steps come from."""

    COMPUTED = "computed"  # from scheduler state and groups
    CONFIGURED = "configured"  # from recorded arguments, true only if the next launch has the same
    STORED = "stored"  # recorded in memory when the checkpoint was saved
    UNKNOWN = "unknown"  # no file can tell; the ratio is proved all the same


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackRequest:
    """`--to step[@launch]` and what goes with it. `sets` are literal field values."""

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

    def __post_init__(self) -> None:
        if self.lr_scale is not None and self.lr is not None:
            raise PlanRefused("--lr-scale and --lr both given", remedy="give the factor or the absolute LR, not both")
        for name, value in (("--lr-scale", self.lr_scale), ("--lr", self.lr)):
            if value is not None and not 0.0 < value < float("inf"):
                raise PlanRefused(f"{name} {value!r}: expected a positive number")
        if self.warmup_steps < 0 or self.skip_batches < 0:
            raise PlanRefused("--warmup and --skip-batches count steps and batches: expected 0 or more")

    @property
    def asks_next_launch(self) -> bool:
        """Whether something is asked that stands in the contract alone."""
        return bool(self.warmup_steps or self.skip_batches or self.reshuffle or self.accept_change)

    def to_json(self) -> dict[str, Any]:
        record = asdict(self)
        return record | {"sets": dict(self.sets), "accept_change": list(self.accept_change)}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> RollbackRequest:
        """A request from a file that anybody may have written; raises `PlanRefused` when it is none."""
        try:
            request = cls(**{**record, "accept_change": tuple(record.get("accept_change", ()))})
        except (TypeError, AttributeError) as problem:
            raise PlanRefused(f"the plan's request cannot be read: {problem}", "plan again") from None
        for name, kinds in _KINDS.items():
            value = getattr(request, name)
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                raise PlanRefused(f"the plan's request has {name} {str(value)[:80]!r}: it is no such value", "plan again")
        inner = (*request.sets.values(), *([] if request.launch is None else [request.launch]))
        texts = (*request.sets, *request.accept_change)
        if not all(isinstance(v, int | float) for v in inner) or not all(isinstance(t, str) for t in texts):
            raise PlanRefused("the plan's request holds something that is neither number nor text", "plan again")
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
}


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """A file the plan was made from; `fingerprint` is its sha256, or size, time and inode of a very large one."""

    path: str
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Later:
    """A checkpoint beside the target that will be moved out of the loader's sight."""

    name: str
    step: int
    launch: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PointerEdit:
    """What names a checkpoint in the root: a small text file such as DeepSpeed's `latest`, or a symbolic link."""

    path: str
    before: str
    after: str
    is_link: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedLrs:
    """What the next launch will find: LR and initial LR per parameter group, and the LRs of the coming steps.

    `next_lrs` has one row a step, the first being the step right after the resume; `None` with `reason` when unknown.
    `ratio` is proved against the unedited checkpoint, `None` when single fields were set to absolute values.
    """

    lrs: tuple[float, ...]
    initial_lrs: tuple[float | None, ...]
    ratio: float | None
    next_lrs: LrTable | None
    source: Source
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"source": str(self.source)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What is given up: steps of the present lineage after the target, and hours where the pace is known."""

    steps: int | None = None
    hours: float | None = None


# --- Options that need runtime support

WARMUP, SKIP, RESHUFFLE = "warmup", "skip", "reshuffle"
HONOURED = (WARMUP, SKIP, RESHUFFLE)

# what a person can do with a trainer that does not; "" is for scripts of no known writer
_OWN: Mapping[str, Mapping[str, str]] = {
    "transformers": {
        WARMUP: "no option of the Trainer warms up again after a resume: scale with --lr-scale instead",
        SKIP: "the Trainer skips what was trained on and no more: leave the batches out of `train_dataset` "
        "(`ignore_data_skip` would start the data anew)",
        RESHUFFLE: "give the Trainer another `data_seed` together with `ignore_data_skip`",
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
    """Raise `PlanRefused` for the first of the three that was asked for and that this run does not carry out."""
    asked = {
        WARMUP: ("--warmup", request.warmup_steps),
        SKIP: ("--skip-batches", request.skip_batches),
        RESHUFFLE: ("--reshuffle", request.reshuffle),
    }
    for name, (option, value) in asked.items():
        if value and name not in honours:
            raise PlanRefused(
                f"{option} is carried out by the trainer or its guard, and the run that saved this checkpoint has not said "
                "that it can",
                remedy=f"{own_option(name, format_name)}; or let the script carry it out and say so: "
                f'`chronicle.guard(…, honours=("{name}",))`',
            )


def own_option(name: str, format_name: str) -> str:
    """What does the same with the trainer's own means."""
    writer = next((known for known in ("transformers", "lightning", "deepspeed", "accelerate") if known in format_name), "")
    if format_name.startswith("accelerate"):
        writer = "accelerate"
    return _OWN[writer][name]

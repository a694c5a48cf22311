"""A description of memory: made by `fingerprint`, stored in the manifest at a save, compared at a load. Pure.

No torch and no disk here. Every field may be absent (None or empty), because an older manifest or another framework does not
have it. An absent field is not compared.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import isfinite
from typing import Any

MEMORY_VERSION = 1
WHOLE = "memory"  # the part that is unknown when nothing could be described
OTHERS = "other_optimizers"  # in the topology: classes that step parameters of the guarded optimizers

WHOLE_PARTS = frozenset(
    (
        *("step", "groups", "optimizer_steps", "schedulers", "next_lrs", "topology", "scaler", "averages", "objects", "order"),
        *("frozen", "training", "data"),
    )
)
RANK_PARTS = frozenset(("rng", "weights", "moments", "buffers"))
GROUP_PARTS = frozenset(("lr", "moment_norm"))

LrRow = tuple[float | None, ...]  # LR per parameter group; None: the group has none of its own (Adafactor)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamGroup:
    """One parameter group of an optimizer. `moment_norm` is the L2 norm of its first moments, None where it has none."""

    lr: float | None
    initial_lr: float | None = None
    max_lr: float | None = None
    min_lr: float | None = None
    weight_decay: float | None = None
    num_params: int = 0
    num_elements: int = 0
    moment_norm: float | None = None
    num_states: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)  # other plain options: betas, momentum, eps, …


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduler:
    """One LR scheduler. `unit` is how often it is stepped per optimizer step (1, or num_processes when prepared)."""

    name: str  # class name; "class" in the stored form
    last_epoch: int | None = None
    step_count: int | None = None
    last_lr: tuple[float, ...] = ()
    unit: int = 1
    further: tuple[tuple[float, ...], ...] = ()  # values of its functions, far ahead (`learning_rate.far_points`)
    bound: tuple[Mapping[str, float], ...] = ()  # numbers bound in each function, by name (`horizon.bound_numbers`)


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """Options of one rollback that the guard applies, from optimizer step `step` on."""

    rollback: str
    step: int
    warmup: int = 0  # steps
    skip: int = 0  # batches of the loader
    reshuffle: bool = False
    accumulation: int = 1  # batches of the loader per optimizer step


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDigest:
    """Digests of one rank, 64 bits in hex; "" for what it does not have. Less than a kilobyte in JSON."""

    rank: int
    rng: Mapping[str, str] = field(default_factory=dict)  # python | numpy | torch | cuda -> digest
    weights: str = ""
    each: str = ""  # 16 bits of every weight, in hex; of rank 0
    moments: str = ""
    buffers: str = ""  # running statistics and other saved buffers
    own_buffers: tuple[str, ...] = ()  # those that this training changes between a step and the next batch (`buffers.py`)
    fixed_buffers: str = ""  # and all others, where there are such
    data: str = ""
    batches: str = ""  # position in this rank's record of batches (`batch_record.py`)

    def to_json(self) -> dict[str, Any]:
        """The stored form."""
        record = asdict(self)
        if not self.each:
            del record["each"]
        return record if self.own_buffers else {k: v for k, v in record.items() if k not in ("own_buffers", "fixed_buffers")}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "RankDigest":
        """Parse the stored form; unknown keys are ignored, missing ones empty."""
        return cls(
            rank=int(record.get("rank", 0)),
            rng={str(k): str(v) for k, v in dict(record.get("rng") or {}).items()},
            weights=str(record.get("weights") or "") if "buffers" in record else "",  # older manifests: one digest of both
            each=str(record.get("each") or ""),
            buffers=str(record.get("buffers") or ""),
            own_buffers=tuple(str(name) for name in record.get("own_buffers") or ()),
            fixed_buffers=str(record.get("fixed_buffers") or ""),
            moments=str(record.get("moments") or ""),
            data=str(record.get("data") or ""),
            batches=str(record.get("batches") or ""),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The state of a run in memory at one step, seen from one rank, with the digests of all ranks."""

    step: int | None = None  # optimizer steps completed
    groups: tuple[ParamGroup, ...] = ()
    optimizer_steps: tuple[int, int] | None = None  # smallest and largest per-parameter step of the optimizer
    optimizers: tuple[str, ...] = ()
    schedulers: tuple[Scheduler, ...] = ()
    next_lrs: tuple[LrRow, ...] | None = None  # row i: LR per group of the i-th optimizer step from here
    lr_source: str = "untested"  # scheduler: forecasts came true | manual: they did not | untested
    lr_moved: bool = True  # forecasts of an LR that moves came true; False: of a constant one at most
    recent_lrs: tuple[LrRow, ...] = ()  # of the last optimizer steps before this point
    used: Mapping[str, Sequence[LrRow]] = field(default_factory=dict)  # option -> its values so far (`hand_set.py`)
    seen_frozen: tuple[str, ...] = ()  # `frozen` so far, one after the other
    habits: tuple[str, ...] = ()  # what this training changes between a save and its next step (`sequel.py`)
    topology: Mapping[str, Any] = field(default_factory=dict)
    scaler: Mapping[str, Any] | None = None
    averages: Mapping[str, str] = field(default_factory=dict)  # name of an averaged copy (EMA) -> digest
    objects: Mapping[str, str] = field(default_factory=dict)  # the script's own saved objects -> digest
    order: str = ""  # which model parameter is at each position of the optimizers
    frozen: str = ""  # how many parameters have no gradient, and which
    training: tuple[bool, ...] | None = None  # mode of each model at the optimizer steps; None: no step was seen
    data: Any = None  # the trainer's own data position, JSON-able
    honours: tuple[str, ...] = ()  # options of a rollback that this run supports, by its script or the guard
    carried: tuple[Carried, ...] = ()  # options that the guard has begun to apply, oldest first
    loader: int | None = None  # which of its loaders the training reads from
    trained: Mapping[str, Any] = field(default_factory=dict)  # configuration, data and scheduler states (`trained.py`)
    spoilt: str = ""  # why this state is no target of a rollback: NaN in the weights, replicas that differ
    revisions: Mapping[str, str] = field(default_factory=dict)  # digests of tokenizer and chat template, commit of the model
    identity: Mapping[str, Any] = field(default_factory=dict)  # of the saved state: id, run_id, run, launch, step
    ranks: tuple[RankDigest, ...] = ()
    unknown: Mapping[str, str] = field(default_factory=dict)  # part that could not be described -> why

    def of_rank(self, rank: int) -> RankDigest | None:
        """The digest of one rank, None when it was not recorded."""
        return next((digest for digest in self.ranks if digest.rank == rank), None)

    def without(self, parts: Collection[str]) -> "Memory":
        """This description without some parts, which then count as not recorded."""
        if not parts:
            return self
        empty, nothing = Memory(), RankDigest(rank=0)
        own = {part: getattr(empty, part) for part in parts if part in WHOLE_PARTS}
        digests = {part: getattr(nothing, part) for part in parts if part in RANK_PARTS}
        groups = own.get("groups", self.groups)
        for part in parts:
            if part in GROUP_PARTS:
                groups = tuple(replace(group, **{part: None}) for group in groups)
        ranks = tuple(replace(digest, **digests) for digest in self.ranks)
        return replace(self, **{**own, "groups": groups, "ranks": ranks})

    def to_json(self) -> dict[str, Any]:
        """The stored form (`memory` of the manifest)."""
        record = {
            "v": MEMORY_VERSION,
            "step": self.step,
            "groups": [asdict(group) for group in self.groups],
            "optimizer_steps": None if self.optimizer_steps is None else list(self.optimizer_steps),
            "optimizers": list(self.optimizers),
            "schedulers": [_scheduler_json(scheduler) for scheduler in self.schedulers],
            "next_lrs": None if self.next_lrs is None else [list(row) for row in self.next_lrs],
            "lr_source": self.lr_source,
            **({} if self.lr_moved else {"lr_moved": False}),
            "recent_lrs": [list(row) for row in self.recent_lrs],
            "topology": dict(self.topology),
            "scaler": None if self.scaler is None else dict(self.scaler),
            "averages": dict(self.averages),
            "objects": dict(self.objects),
            "order": self.order,
            "frozen": self.frozen,
            "training": None if self.training is None else list(self.training),
            "rng": {str(digest.rank): dict(digest.rng) for digest in self.ranks},
            "ranks": [digest.to_json() for digest in self.ranks],
            "data": self.data,
            "honours": list(self.honours),
            "carried": [asdict(one) for one in self.carried],
            "loader": self.loader,
            **({"trained": dict(self.trained)} if self.trained else {}),
            **({"used": {name: [list(row) for row in rows] for name, rows in self.used.items()}} if self.used else {}),
            **({"habits": list(self.habits)} if self.habits else {}),
            **({"seen_frozen": list(self.seen_frozen)} if len(self.seen_frozen) > 1 else {}),
            **({"revisions": dict(self.revisions)} if self.revisions else {}),
            **({"identity": dict(self.identity)} if self.identity else {}),
            **({"unknown": dict(self.unknown)} if self.unknown else {}),
            **({"spoilt": self.spoilt} if self.spoilt else {}),
        }
        plain: dict[str, Any] = plain_numbers(record)
        return plain

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "Memory":
        """Parse the stored form; a missing field is absent, an unknown one ignored."""
        steps = record.get("optimizer_steps")
        rows, modes = record.get("next_lrs"), record.get("training")
        return cls(
            step=record.get("step"),
            groups=tuple(_parse_group(group) for group in record.get("groups") or ()),
            optimizer_steps=None if steps is None else (int(steps[0]), int(steps[1])),
            optimizers=tuple(str(name) for name in record.get("optimizers") or ()),
            schedulers=tuple(_parse_scheduler(item) for item in record.get("schedulers") or ()),
            next_lrs=None if rows is None else _parse_rows(rows),
            lr_source=str(record.get("lr_source") or "untested"),
            lr_moved=record.get("lr_moved") is not False,
            recent_lrs=_parse_rows(record.get("recent_lrs") or ()),
            used={str(name): _parse_rows(rows) for name, rows in dict(record.get("used") or {}).items()},
            habits=tuple(str(name) for name in record.get("habits") or ()),
            seen_frozen=tuple(str(one) for one in record.get("seen_frozen") or ()),
            topology=dict(record.get("topology") or {}),
            scaler=record.get("scaler"),
            averages=dict(record.get("averages") or {}),
            objects=dict(record.get("objects") or {}),
            order=str(record.get("order") or ""),
            frozen=str(record.get("frozen") or ""),
            training=None if modes is None else tuple(bool(mode) for mode in modes),
            data=record.get("data"),
            honours=tuple(str(name) for name in record.get("honours") or ()),
            carried=tuple(_parse_carried(one) for one in record.get("carried") or ()),
            loader=record.get("loader"),
            trained=dict(record.get("trained") or {}),
            revisions={str(name): str(one) for name, one in (record.get("revisions") or {}).items()},
            identity=dict(record.get("identity") or {}),
            spoilt=str(record.get("spoilt") or ""),
            ranks=tuple(RankDigest.from_json(item) for item in record.get("ranks") or ()),
            unknown={str(part): str(why) for part, why in dict(record.get("unknown") or {}).items()},
        )


def plain_numbers(value: Any) -> Any:
    """The same with NaN and infinity as text, which JSON lacks; `float` reads them again."""
    if isinstance(value, float) and not isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: plain_numbers(one) for key, one in value.items()}
    return [plain_numbers(one) for one in value] if isinstance(value, list) else value


def _parse_carried(record: Mapping[str, Any]) -> Carried:
    return Carried(
        rollback=str(record["rollback"]),
        step=int(record["step"]),
        warmup=int(record.get("warmup") or 0),
        skip=int(record.get("skip") or 0),
        reshuffle=bool(record.get("reshuffle")),
        accumulation=int(record.get("accumulation") or 1),
    )


def _parse_group(record: Mapping[str, Any]) -> ParamGroup:
    return ParamGroup(
        lr=_float(record.get("lr")),
        initial_lr=_float(record.get("initial_lr")),
        max_lr=_float(record.get("max_lr")),
        min_lr=_float(record.get("min_lr")),
        weight_decay=_float(record.get("weight_decay")),
        num_params=int(record.get("num_params") or 0),
        num_elements=int(record.get("num_elements") or 0),
        moment_norm=_float(record.get("moment_norm")),
        num_states=int(record.get("num_states") or 0),
        settings=dict(record.get("settings") or {}),
    )


def _scheduler_json(scheduler: Scheduler) -> dict[str, Any]:
    return {
        "class": scheduler.name,
        "last_epoch": scheduler.last_epoch,
        "step_count": scheduler.step_count,
        "last_lr": list(scheduler.last_lr),
        "unit": scheduler.unit,
        "further": [list(row) for row in scheduler.further],
        **({"bound": [dict(numbers) for numbers in scheduler.bound]} if scheduler.bound else {}),
    }


def _parse_scheduler(record: Mapping[str, Any]) -> Scheduler:
    return Scheduler(
        name=str(record.get("class") or "?"),
        last_epoch=record.get("last_epoch"),
        step_count=record.get("step_count"),
        last_lr=tuple(float(lr) for lr in record.get("last_lr") or ()),
        unit=1 if record.get("unit") is None else int(record["unit"]),  # 0: stepped once an epoch
        further=tuple(tuple(float(lr) for lr in row) for row in record.get("further") or ()),
        bound=tuple(dict(numbers) for numbers in record.get("bound") or ()),
    )


def _parse_rows(rows: Sequence[Sequence[float | None]]) -> tuple[LrRow, ...]:
    return tuple(tuple(_float(lr) for lr in row) for row in rows)


def _float(value: Any) -> float | None:
    return None if value is None else float(value)

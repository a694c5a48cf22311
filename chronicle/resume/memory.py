"""A description of memory: made by `fingerprint`, stored in the manifest at a save, compared at a load. Pure.

No torch and no disk here. Every field may be absent (None or empty), because an older manifest or another framework does not
have it. An absent field is not compared. The stored form is the fields by name, in JSON.
"""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from math import isfinite
from types import UnionType
from typing import Any, get_args, get_origin

MEMORY_VERSION = 1
WHOLE = "memory"  # the part that is unknown when nothing could be described
OTHERS = "other_optimizers"  # in the topology: classes that step parameters of the guarded optimizers

SPARSE: Any = {"sparse": True}  # a field that is not stored where it has its default

LrRow = tuple[float | None, ...]  # LR per parameter group; None: the group has none of its own (Adafactor)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamGroup:
    """One parameter group of an optimizer."""

    lr: float | None
    initial_lr: float | None = None
    max_lr: float | None = None
    min_lr: float | None = None
    weight_decay: float | None = None
    num_params: int = 0
    num_elements: int = 0
    num_states: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)  # other plain options: betas, momentum, eps, …


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduler:
    """One LR scheduler. `unit` is how often it is stepped per optimizer step (prepared: num_processes; 0: once an epoch)."""

    name: str = field(default="?", metadata={"key": "class"})
    last_epoch: int | None = None
    unit: int = 1
    further: tuple[tuple[float, ...], ...] = ()  # values of its functions, far ahead (`learning_rate.far_points`)
    bound: tuple[Mapping[str, float], ...] = field(default=(), metadata=SPARSE)  # numbers bound in each (`horizon.py`)


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

    rank: int = 0
    rng: Mapping[str, str] = field(default_factory=dict)  # python | numpy | torch | cuda -> digest
    weights: str = ""
    each: str = field(default="", metadata=SPARSE)  # 16 bits of every weight, in hex; of rank 0
    moments: str = ""
    each_moment: str = field(default="", metadata=SPARSE)  # 16 bits of every moment; of rank 0
    each_buffer: Mapping[str, str] = field(default_factory=dict, metadata=SPARSE)  # running statistics and others, by name
    moving: tuple[str, ...] = field(default=(), metadata=SPARSE)  # what this training moves without a step
    data: str = ""  # of this rank alone, on its way to the main process
    batches: str = ""  # position in this rank's record of batches (`first_pass.py`)

    def to_json(self) -> dict[str, Any]:
        """The stored form."""
        return _stored(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "RankDigest":
        """Parse the stored form; unknown keys are ignored, missing ones empty."""
        return cls(**read_fields(cls, record))


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
    recent_lrs: tuple[LrRow, ...] = ()  # of the last optimizer steps before this point
    moved_options: tuple[str, ...] = field(default=(), metadata=SPARSE)  # of the parameter groups, that this training moves
    seen_frozen: tuple[str, ...] = field(default=(), metadata=SPARSE)  # `frozen` so far, one after the other
    habits: tuple[str, ...] = field(default=(), metadata=SPARSE)  # what changes between a save and its next step
    topology: Mapping[str, Any] = field(default_factory=dict)
    scaler: Mapping[str, Any] | None = None
    averages: Mapping[str, str] = field(default_factory=dict)  # name of an averaged copy (EMA) -> digest
    # the script's own saved objects -> digest of their values; `objects`, of earlier versions, had some by their class
    objects: Mapping[str, str] = field(default_factory=dict, metadata={"key": "object_values"})
    order: str = ""  # which model parameter is at each position of the optimizers
    frozen: str = ""  # how many parameters have no gradient, and which
    data: Any = None  # the trainer's own data position, JSON-able
    honours: tuple[str, ...] = ()  # options of a rollback that this run supports, by its script or the guard
    carried: tuple[Carried, ...] = ()  # options that the guard has begun to apply, oldest first
    loader: int | None = None  # which of its loaders the training reads from
    trained: Mapping[str, Any] = field(default_factory=dict, metadata=SPARSE)  # configuration, data … (`trained.py`)
    unregistered: Mapping[str, str] = field(default_factory=dict, metadata=SPARSE)  # facts of what nobody registered
    spoilt: str = field(default="", metadata=SPARSE)  # why no rollback goes here: NaN in the weights, replicas that differ
    identity: Mapping[str, Any] = field(default_factory=dict, metadata=SPARSE)  # id, run_id, run, launch, step
    ranks: tuple[RankDigest, ...] = ()
    unknown: Mapping[str, str] = field(default_factory=dict, metadata=SPARSE)  # part that could not be described -> why

    def of_rank(self, rank: int) -> RankDigest | None:
        """The digest of one rank, None when it was not recorded."""
        return next((digest for digest in self.ranks if digest.rank == rank), None)

    @property
    def state_id(self) -> str:
        """The id that the saved state carries; "" for none."""
        return str(self.identity.get("id") or "")

    def to_json(self) -> dict[str, Any]:
        """The stored form (`memory` of the manifest)."""
        return {"v": MEMORY_VERSION, **_stored(self)}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "Memory":
        """Parse the stored form; a missing field is absent, an unknown one ignored."""
        return cls(**read_fields(cls, record))


# ---- the stored form: every field by its name ------------------------------------------------------------------------


def plain_numbers(value: Any) -> Any:
    """The same as JSON holds it: lists for tuples, and NaN and infinity as text, which `float` reads again."""
    if isinstance(value, float) and not isfinite(value):
        return str(value)
    if is_dataclass(value):
        return _stored(value)
    if isinstance(value, Mapping):
        return {key: plain_numbers(one) for key, one in value.items()}
    return [plain_numbers(one) for one in value] if isinstance(value, list | tuple) else value


def _stored(thing: Any) -> dict[str, Any]:
    record = {}
    for one in fields(thing):
        value = getattr(thing, one.name)
        if value != _default(one) or "sparse" not in one.metadata:
            record[one.metadata.get("key", one.name)] = plain_numbers(value)
    return record


def read_fields(kind: Any, record: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a dataclass that are in a record, each as the type with which it is declared."""
    found = {}
    for one in fields(kind):
        value = record.get(one.metadata.get("key", one.name))
        if value is not None or _default(one) is MISSING:
            found[one.name] = _read(one.type, value)
    return found


def _read(kind: Any, value: Any) -> Any:
    if value is None or kind is Any:
        return value
    if isinstance(kind, UnionType):
        return _read(get_args(kind)[0], value)
    if is_dataclass(kind):
        return kind(**read_fields(kind, value))  # type: ignore[operator]
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Mapping:
        return {str(key): _read(inner[1], one) for key, one in value.items()}
    if origin in (tuple, Sequence):
        return tuple(_read(inner[0], one) for one in value)
    return kind(value)


def _default(one: "Field[Any]") -> Any:
    return one.default if one.default_factory is MISSING else one.default_factory()

"""The state of a checkpoint that decides how the run continues: schedulers, optimizers, counters, RNG, topology.

The formats in `rollback.checkpoint.formats` fill these values with the functions below, which recognise the state dicts of
torch's optimizers (`param_groups`, `state`; or with flattened keys, as torchtitan saves them) and LR schedulers (the
scheduler's `__dict__` without the optimizer; torch/optim/optimizer.py and lr_scheduler.py). DeepSpeed's own schedulers
hold `last_batch_iteration`; those of timm and mmengine `base_values`, Megatron-core's `max_lr`. What concerns the LR and
is none of these is kept as a hint (`hints_in`): an LR edit is not proved then.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from typing import TYPE_CHECKING, Any

from rollback.checkpoint.layout import Checkpoint
from rollback.errors import Finding, UnreadableFile
from rollback.files.pickle_values import ArrayRef, Opaque, TensorRef
from rollback.files.torch_tree import children_of, plain_number

if TYPE_CHECKING:
    from rollback.checkpoint.account import Accounted

Prefix = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerState:
    """One stored scheduler: the file, the key path of its state dict in it, the state itself.

    `owner` says who saved it ("prepared", "registered", "engine", "trainer", "app"); `authoritative` is False for a
    copy that a later load overwrites.
    """

    file: str
    prefix: Prefix
    state: Mapping[str, object]
    owner: str
    authoritative: bool = True
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerState:
    """One stored optimizer (or one rank's part of it): `prefix` leads to the dict that holds `param_groups`.

    `steps` are the smallest and the largest per-parameter step counters, None when there are none. `num_states`
    counts parameters with state.
    """

    file: str
    prefix: Prefix
    groups: tuple[Mapping[str, object], ...]
    steps: tuple[int, int] | None
    rank: int | None = None
    num_states: int = 0
    owner: str = "optimizer"
    moments: tuple[str, ...] = ()
    flat_names: tuple[tuple[str, ...], ...] = ()  # where keys are flattened: the parameters of each group

    def group_keys(self, index: int, field: str) -> tuple[Prefix, ...]:
        """The key paths at which a group's field is stored: one, or with flattened keys one per parameter."""
        if not self.flat_names:
            return ((*self.prefix, "param_groups", index, field),)
        return tuple((*self.prefix, f"param_groups.{name}.{field}") for name in self.flat_names[index])


class HintKind(StrEnum):
    """What a part of a state file looks like."""

    SCHEDULER = "scheduler"  # a scheduler's by its name or its fields, but not the state dict of a torch scheduler
    ARGUMENTS = "arguments"  # arguments or a config that name an LR


@dataclass(frozen=True, slots=True, kw_only=True)
class LrHint:
    """A part of a state file that concerns the LR and is no known scheduler: where it lies, and its plain values."""

    file: str
    keys: Prefix
    kind: HintKind
    values: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointState:
    """The numbers that decide how the run continues from a checkpoint.

    `scheduler_unit` is `last_epoch` per optimizer step (1, or the number of processes for a scheduler that went
    through `accelerator.prepare`), None when it cannot be told. `optimizer_step` is the optimizer's own count (of
    several, the largest); `writer_step` the writer's own counter, by its own rule: Lightning adds up all optimizers.
    `counters` are named by file and key path; `topology`, `config` and `data` hold what the writer recorded.
    `findings` are problems that reading showed (F2, F4, F9). `located` is used by `file_holding`. `lr_hints` are parts
    that concern the LR and were not understood (`hints_in`). Of what is `unread` nothing is said but that.
    """

    checkpoint: Checkpoint
    schedulers: tuple[SchedulerState, ...] = ()
    optimizers: tuple[OptimizerState, ...] = ()
    counters: Mapping[str, int | float] = field(default_factory=dict)
    rng_ranks: tuple[int, ...] = ()
    world_size: int | None = None
    scheduler_unit: int | None = None
    optimizer_step: int | None = None
    writer_step: int | None = None
    notes: tuple[str, ...] = ()
    topology: Mapping[str, object] = field(default_factory=dict)
    data: Mapping[str, object] = field(default_factory=dict)
    rng_digests: Mapping[int, str] = field(default_factory=dict)
    config: Mapping[str, object] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    located: Mapping[tuple[str, Prefix], str] = field(default_factory=dict)
    lr_hints: tuple[LrHint, ...] = ()
    unread: str = ""  # what of a format that is only named was not read, in words
    doubtful: tuple[str, ...] = ()  # what concerns the LR, or may, and was not read: where and why
    account: tuple[Accounted, ...] = ()  # every file, and how far it was read
    assumed: tuple[str, ...] = ()  # what of the next launch may set an LR and is not in the checkpoint

    def file_holding(self, file: str, keys: Prefix) -> str:
        """The file on disk that holds a field: `file` itself, or the part that it lies in when `file` is an index."""
        for length in range(len(keys), 0, -1):
            part = self.located.get((file, keys[:length]))
            if part is not None:
                return part
        return file


# --- Optimizers saved flat

_GROUP_KEY = re.compile(r"param_groups\.(?P<name>.+)\.(?P<field>[A-Za-z_0-9]+)")
_STATE_KEY = re.compile(r"state\.(?P<name>.+)\.(?P<field>[A-Za-z_0-9]+)")


@dataclass(frozen=True, slots=True)
class FlatOptimizer:
    """`groups` with the parameters of each, and the values kept for each parameter."""

    groups: tuple[tuple[Mapping[str, object], tuple[str, ...]], ...]
    states: Mapping[str, Mapping[str, object]] = field(default_factory=dict)


def is_flat_optimizer(value: Mapping[object, object]) -> bool:
    """Whether these are the flattened keys of an optimizer."""
    return any(isinstance(key, str) and key.startswith("param_groups.") and key.endswith(".lr") for key in value)


def read_flat_optimizer(value: Mapping[object, object]) -> FlatOptimizer:
    """Group the parameters whose values are equal, in their order."""
    values: dict[str, dict[str, object]] = {}
    states: dict[str, dict[str, object]] = {}
    for key, part in value.items():
        for pattern, found in ((_GROUP_KEY, values), (_STATE_KEY, states)):
            match = pattern.fullmatch(key) if isinstance(key, str) else None
            if match is not None:
                found.setdefault(match["name"], {})[match["field"]] = part
    groups: dict[str, tuple[Mapping[str, object], list[str]]] = {}
    for name, fields in values.items():
        groups.setdefault(repr(sorted(fields.items())), (fields, []))[1].append(name)
    return FlatOptimizer(tuple((fields, tuple(names)) for fields, names in groups.values()), states)


# --- State dicts of torch

BNB_STATE = "__bnb_optimizer_quant_state__"  # bitsandbytes/optim/optimizer.py: wraps the 8-bit moments for FSDP
_SCHEDULER_KEYS = ({"last_epoch", "_step_count"}, {"last_epoch", "base_lrs"}, {"last_epoch", "_last_lr"},
                   {"_schedulers"}, {"last_batch_iteration"}, {"num_bad_epochs", "patience"},
                   {"base_values", "param_group_field"}, {"base_values", "param_name"},
                   {"min_lr", "lr_decay_style", "lr_decay_steps"},
                   {"hyperparam_value", "metric_values"})  # timm, mmengine, Megatron, SpeechBrain  # fmt: skip
_MAX_COUNTERS = 64
_MAX_SEARCHED = 200_000
_MAX_DEPTH = 200  # as deep as numbers are edited
MAX_LEVELS = 12  # nested schedulers: each takes two levels
_MAX_VALUES = 1_000_000  # of one state dict; a container counts as _CONTAINER of them
_CONTAINER = 10


def as_mapping(value: object) -> Mapping[object, object] | None:
    """A dict, or the attributes of an object of an unknown class; None for anything else."""
    if isinstance(value, dict):
        return value
    if isinstance(value, Opaque):
        return value.children() or None
    return None


def is_scheduler(value: object) -> bool:
    """Whether a value is the state dict of an LR scheduler."""
    found = as_mapping(value)
    return found is not None and any(keys <= found.keys() for keys in _SCHEDULER_KEYS)


def is_optimizer(value: object) -> bool:
    """Whether a value is the state dict of an optimizer: a list of group dicts, each with hyper-parameters."""
    found = as_mapping(value)
    if found is not None and is_flat_optimizer(found):
        return True
    groups = found.get("param_groups") if found is not None else None
    return isinstance(groups, list) and all(isinstance(group, dict) for group in groups)


@dataclass(frozen=True, slots=True)
class Found:
    """One thing in a tree: its key path, and whether it is an "optimizer", a "scheduler", "moments" or "bytes".

    Moments are the tensors of an optimizer that were saved without its groups. Bytes are whatever may hold a file.
    """

    keys: Prefix
    value: object
    kind: str


@dataclass(frozen=True, slots=True)
class Walk:
    """All that was found in a tree, outermost first, in its order; `is_cut`: it has more values than are looked at."""

    found: tuple[Found, ...]
    is_cut: bool


def walk_states(tree: object) -> Walk:
    """Look through a whole tree, at every depth and under keys of every type, also inside objects of unknown classes."""
    found: list[Found] = []
    todo: deque[tuple[Prefix, object]] = deque([((), tree)])
    seen: set[int] = set()
    is_cut = False
    while todo and len(seen) <= _MAX_SEARCHED:
        prefix, value = todo.popleft()
        if id(value) in seen or not (isinstance(value, _CONTAINERS) or _may_hold_file(value)):
            continue
        seen.add(id(value))
        kind = _kind_of(value)
        if kind is not None:
            found.append(Found(prefix, value, kind))
        elif len(prefix) < _MAX_DEPTH:
            todo += [((*prefix, key), part) for key, part in _parts_of(value)]
        else:
            is_cut = True
    return Walk(tuple(found), is_cut or bool(todo))


def _parts_of(value: object) -> Iterator[tuple[Any, object]]:
    """The parts of a value; keys of types that no edit can name stay as they are."""
    yield from value.items() if isinstance(value, dict) else children_of(value) or ()


_CONTAINERS = (dict, list, tuple, Opaque, ArrayRef)
_LEAST_FILE = 64  # elements of the smallest thing that may hold a file with an optimizer


def _may_hold_file(value: object) -> bool:
    """Whether it is bytes in any form: as such, as text, as an array or tensor of bytes, as a list of small numbers."""
    if isinstance(value, bytes):
        return True
    if isinstance(value, TensorRef):
        return value.dtype in ("uint8", "int8") and value.numel >= _LEAST_FILE
    if isinstance(value, ArrayRef):
        return value.content is not None
    if not isinstance(value, (str, list, tuple)) or len(value) < _LEAST_FILE:
        return False
    return isinstance(value, str) or all(isinstance(part, int) and 0 <= part < 256 for part in value)


def _kind_of(value: object) -> str | None:
    if _may_hold_file(value):
        return "bytes"
    if not isinstance(value, (dict, Opaque)):
        return None
    if is_optimizer(value):
        return "optimizer"
    if is_scheduler(value):
        return "scheduler"
    return "moments" if _is_moments(value) else None


MOMENTS = frozenset({"exp_avg", "exp_avg_sq", "momentum_buffer", "square_avg", "exp_inf", "exp_avg_sq_row", "state1"})


def _is_moments(value: object) -> bool:
    """Whether it maps each parameter to the tensors that an optimizer keeps for it."""
    entries = list((as_mapping(value) or {}).values())
    first = as_mapping(entries[0]) if entries else None
    if first is None or not MOMENTS & {key for key in first if isinstance(key, str)}:
        return False
    return any(isinstance(part, TensorRef) for part in first.values())


def find_states(tree: object) -> list[tuple[Prefix, object, str]]:
    """(key path, value, "optimizer" or "scheduler") of every state dict in a tree that an edit can name by its keys."""
    named = [one for one in walk_states(tree).found if one.kind in ("optimizer", "scheduler")]
    return [(one.keys, one.value, one.kind) for one in named if all(isinstance(key, (str, int)) for key in one.keys)]


_SCHEDULER_NAME = re.compile(r"sched|warm_?up", re.IGNORECASE)
_LR_NAME = re.compile(r"(?:[a-z]+_)*(?:lr|learning_?rate|lrs|lr0|lrf)(?:_[a-z0-9]+)*", re.IGNORECASE)
_NO_LR_WORDS = re.compile(
    r"sched|policy|style|type|name|mode|interval|freq|monitor|_(?:steps|iters|epochs)|^(?:decay|use|log)_lr", re.IGNORECASE
)
_COUNTER_FIELDS = frozenset({"num_steps", "num_updates", "t_in_epochs", "last_epoch", "last_step", "_global_step", "T_cur"})
_MAX_HINTS = 32
_MAX_HINT_VALUES = 400


def hints_in(file: str, tree: object, found: Sequence[Prefix]) -> tuple[LrHint, ...]:
    """The parts of a tree that concern the LR and are not among the `found` state dicts of torch's classes.

    A dict counts when its name or that of a container around it is a scheduler's, when its fields are, or when it names
    an LR. Weights are passed over: their values are tensors.
    """
    hints: list[LrHint] = []
    known, seen = set(found), set[int]()
    todo: deque[tuple[Prefix, object, bool]] = deque([((), tree, False)])
    while todo and len(hints) < _MAX_HINTS and len(seen) < _MAX_SEARCHED:
        prefix, value, named = todo.popleft()
        if prefix in known or id(value) in seen:
            continue
        seen.add(id(value))
        parts = as_mapping(value)
        if parts is None:
            if isinstance(value, (list, tuple)) and len(value) <= _MAX_HINT_VALUES:
                todo += [((*prefix, index), part, named) for index, part in enumerate(value)]
            continue
        kind = _hint_kind(parts, named)
        holds = kind is HintKind.SCHEDULER and _holds_known(prefix, known)
        if kind is not None and not (holds and not (named and _has_numbers(parts))):
            values = numbers_in(dict(islice(parts.items(), _MAX_HINT_VALUES)), Budget(file))
            hints.append(LrHint(file=file, keys=prefix, kind=kind, values=values))
            if kind is HintKind.SCHEDULER and not holds:
                continue
        for key, part in parts.items() if len(prefix) < _MAX_DEPTH else ():
            if not isinstance(part, TensorRef):
                name = key if isinstance(key, (str, int)) else str(key)
                todo.append(((*prefix, name), part, named or _SCHEDULER_NAME.search(str(key)) is not None))
    return tuple(hints)


def _holds_known(prefix: Prefix, known: Set[Prefix]) -> bool:
    return any(other[: len(prefix)] == prefix for other in known)


def _has_numbers(parts: Mapping[object, object]) -> bool:
    """Whether a dict around known states keeps numbers of its own."""
    values = (part for value in parts.values() for part in (value if isinstance(value, (list, tuple)) else (value,)))
    return any(isinstance(n := plain_number(v), (int, float)) and not isinstance(n, bool) for v in values)


def _hint_kind(parts: Mapping[object, object], named: bool) -> HintKind | None:
    """What a dict is by its own fields; `named`: it, or what holds it, is called a scheduler."""
    containers = all(isinstance(plain_number(part), (dict, list, tuple, Opaque, TensorRef)) for part in parts.values())
    if named and (not containers or _has_numbers(parts)):
        return HintKind.SCHEDULER
    names = [key for key, part in parts.items() if isinstance(key, str) and names_lr(key) and _is_lr_value(part)]
    fields = {key for key in parts if isinstance(key, str)}
    if fields & {"base_values", "opt_param_scheduler"} or (names and fields & _COUNTER_FIELDS and not _is_large(parts)):
        return HintKind.SCHEDULER
    return HintKind.ARGUMENTS if names else None


def _is_large(parts: Mapping[object, object]) -> bool:
    """Whether a dict has more fields than the state of a scheduler: it is arguments then."""
    return len(parts) > 40


def names_lr(name: str) -> bool:
    """Whether a field of this name holds an LR, and not the kind or the length of a schedule."""
    return _LR_NAME.fullmatch(name) is not None and _NO_LR_WORDS.search(name) is None


def _is_lr_value(value: object) -> bool:
    number = plain_number(value)
    if isinstance(number, (list, tuple)):
        return bool(number) and all(_is_lr_value(part) for part in number)
    return isinstance(number, (int, float)) and not isinstance(number, bool) and number > 0


def scheduler_state(
    file: str, prefix: Prefix, value: object, *, owner: str, rank: int | None = None
) -> SchedulerState:
    """The scheduler at `prefix` of `file`, numbers of 0-dim tensors and numpy scalars as plain numbers."""
    return SchedulerState(
        file=file,
        prefix=prefix,
        state=numbers_in(value, Budget(file)),
        owner=owner,
        rank=rank,
    )


def numbers_in(value: object, budget: Budget) -> dict[str, object]:
    """A copy with string keys in which readable 0-dim tensors are numbers, cut off below MAX_LEVELS.

    The copy never contains itself and is bounded by the budget; raises `UnreadableFile` above it.
    """
    return {str(key): _number(part, MAX_LEVELS, budget) for key, part in (as_mapping(value) or {}).items()}


class Budget:
    """How many more values may be copied out of one state dict of `file`, all groups together."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.left = _MAX_VALUES

    def spend(self, count: int) -> None:
        """Charge `count` values; raises `UnreadableFile` when there are too many."""
        self.left -= count
        if self.left < 0:
            raise UnreadableFile(
                f"`{self.file}`: a state dict of more than {_MAX_VALUES} values: "
                "expected the state of a scheduler or an optimizer"
            )


def _number(value: object, levels: int, budget: Budget) -> object:
    if not isinstance(value, (list, tuple, dict)):
        budget.spend(1)
        return plain_number(value)
    budget.spend(_CONTAINER + len(value) if levels else _CONTAINER)
    if levels == 0:
        return None
    if isinstance(value, dict):
        return {key: _number(part, levels - 1, budget) for key, part in value.items()}
    parts = (_number(part, levels - 1, budget) for part in value)
    return list(parts) if isinstance(value, list) else tuple(parts)


def optimizer_state(
    file: str, prefix: Prefix, value: object, *, rank: int | None = None, owner: str = "optimizer"
) -> OptimizerState:
    """The optimizer at `prefix` of `file`: its groups and the range of its per-parameter step counters."""
    found = as_mapping(value) or {}
    flat = read_flat_optimizer(found) if is_flat_optimizer(found) else None
    groups = (
        found.get("param_groups")
        if flat is None
        else [{**fields, "params": list(names)} for fields, names in flat.groups]
    )
    state = (as_mapping(found.get("state")) or {}) if flat is None else flat.states
    steps: list[int] = []
    moments: set[str] = set()
    for parts in state.values():
        entry = as_mapping(parts) or {}
        tensors = {**entry, **(as_mapping(entry.get(BNB_STATE)) or {})}
        moments.update(str(key) for key, part in tensors.items() if isinstance(part, TensorRef) and part.shape)
        step = _count(entry.get("step"))
        if step is not None:
            steps.append(step)
    listed = groups if isinstance(groups, list) else []
    for group in listed:
        step = _count(group.get("step")) if isinstance(group, dict) else None
        if step is not None:  # FusedAdam stores the counter in the group
            steps.append(step)
    budget = Budget(file)
    return OptimizerState(
        file=file,
        prefix=prefix,
        groups=tuple(numbers_in(group, budget) for group in listed),
        steps=(min(steps), max(steps)) if steps else None,
        rank=rank,
        num_states=len(state),
        owner=owner,
        moments=tuple(sorted(moments)),
        flat_names=() if flat is None else tuple(names for _, names in flat.groups),
    )


def _count(value: object) -> int | None:
    number = plain_number(value)
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        return None
    return int(number) if number == number and abs(number) < 2**62 else None


def counters_in(file: str, value: object, *, levels: int = 2) -> dict[str, int | float]:
    """Plain numbers near the top of a tree, named `file:key.path`, at most _MAX_COUNTERS of them."""
    found: dict[str, int | float] = {}
    for name, number in _numbers_below(value, "", levels):
        if len(found) >= _MAX_COUNTERS:
            break
        found[f"{file}:{name}"] = number
    return found


def _numbers_below(value: object, path: str, levels: int) -> Iterator[tuple[str, int | float]]:
    for key, part in (as_mapping(value) or {}).items():
        name = f"{path}.{key}" if path else str(key)
        number = plain_number(part)
        if isinstance(number, (int, float)) and not isinstance(number, bool):
            yield name, number
        elif levels > 1:
            yield from _numbers_below(part, name, levels - 1)


def newest_step(optimizers: Iterable[OptimizerState]) -> int | None:
    """The largest step counter of all optimizers; None when there is none."""
    return max((one.steps[1] for one in optimizers if one.steps), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundStates:
    """The optimizers and schedulers of a tree, found by their keys, and where they lie."""

    optimizers: tuple[OptimizerState, ...]
    schedulers: tuple[SchedulerState, ...]
    prefixes: tuple[Prefix, ...]


def states_in(file: str, tree: object, *, owner: str, rank: int | None = None) -> FoundStates:
    """The optimizers and schedulers in the tree of `file`."""
    found = find_states(tree)
    return FoundStates(
        optimizers=tuple(
            optimizer_state(file, prefix, value, owner=owner, rank=rank) for prefix, value, kind in found if kind == "optimizer"
        ),
        schedulers=tuple(
            scheduler_state(file, prefix, value, owner=owner, rank=rank) for prefix, value, kind in found if kind == "scheduler"
        ),
        prefixes=tuple(prefix for prefix, _, _ in found),
    )


def last_epoch_of(state: Mapping[str, object]) -> int | None:
    """How often the scheduler was stepped; of a composite, the largest among its parts."""
    for name in ("last_epoch", "last_batch_iteration"):
        count = _count(state.get(name))
        if count is not None:
            return count
    parts = state.get("_schedulers")
    counts = [last_epoch_of(part) for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    return max((count for count in counts if count is not None), default=None)


def scheduler_unit(schedulers: tuple[SchedulerState, ...], step: int | None, world_size: int | None) -> int | None:
    """`last_epoch` per optimizer step: 1 or the number of processes; exact first, then with one step of slack.

    The slack is the layout's own constant offset (seed: Adam's step is the name's plus one). None when neither fits.
    """
    counts = [last_epoch_of(s.state) for s in schedulers if s.authoritative]
    known = [count for count in counts if count is not None]
    if not known or not step:
        return None
    units = dict.fromkeys((1, world_size or 1))
    for slack in (0, 1):
        for unit in units:
            if all(abs(count - unit * step) <= slack * unit for count in known):
                return unit
    if world_size is None and len(set(known)) == 1 and known[0] > 0 and known[0] % step == 0:
        return known[0] // step
    return None

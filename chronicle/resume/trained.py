"""What is trained, as the guard records it at a save and compares it at a resume: the field `trained` of `Memory`.

It holds the configuration of the models (`configuration.py`), dataset, order and shape of the batches (`feed.py`), the full
state of the schedulers, and gradients that were left over. `TrainedWatch` makes the record before the first step and again at
every save, so that values which move while a launch trains (counters, caches, annealed factors) are known and not compared.
Nothing is done at a step.

A difference that is refused is named value by value (`transformer.h.0.attn.dropout.p: 0.1 → 0.0`) and can be accepted by its
name or that of its row in `rules.py`; one that may be is said in one line.
"""

import inspect
import operator
import re
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from chronicle.resume.checks.check import Check, Outcome, noted
from chronicle.resume.configuration import (
    SKIPPED,
    flat_values,
    model_record,
    moved_between,
    other_mode,
    pattern_of,
    plain_value,
    unwrapped,
)
from chronicle.resume.contract import Expectation
from chronicle.resume.events import BatchEntered, Saved, StepBegins
from chronicle.resume.feed import LENGTH, ROWS, Shapes, feed_record
from chronicle.resume.fingerprint import LiveState
from chronicle.resume.horizon import numbers_used_by
from chronicle.resume.hub import RESTS, Observer, Rest
from chronicle.resume.memory import Memory
from chronicle.resume.rules import RULES, is_near, judge
from chronicle.resume.training import Training

VERSION = 1
LIBRARIES = ("torch", "transformers", "diffusers", "peft", "timm", "lightning", "accelerate")
MAKERS = ("torch", "transformers", "diffusers", "deepspeed", "accelerate", "lightning", "pytorch_lightning")  # of schedulers
# compared elsewhere (position, LRs), or no part of the state
APART = {"last_epoch", "step_count", "last_lr", "verbose", "optimizer", "lr_lambdas", "num_steps"}


_mode_of = operator.attrgetter("training")


class TrainedWatch(Observer):
    """The record of one launch, and which of its values move as it trains."""

    about = "what is trained"

    def __init__(self, training: Training) -> None:
        self._training = training
        self.shapes = Shapes()
        self._first: dict[str, Any] = {}
        self._feed: dict[str, Any] = {}
        self._moved: set[str] = set()
        self._left_over: dict[str, int] = {}
        self._models: list[weakref.ref[Any]] = []  # of the record of this launch
        self._modules: list[Any] = []  # of the models, in their order
        self._may_be_others = True  # the script may have put other modules into a model meanwhile
        self._modes: list[bool] = []  # of these modules, right before the last step

    def batch_entered(self, event: BatchEntered) -> Rest | None:
        """Before the first batch: gradients that exist now belong to no step of this launch."""
        if event.is_first and not self._training.off:
            self._left_over = gradients_of(self._training.observe().models)
        if not event.is_looked_at and not event.is_first:
            return RESTS
        if event.is_looked_at:
            self.shapes.see(event.batch)
        return None

    def saved(self, event: Saved) -> None:
        """The batches that follow are those after the save."""
        self.shapes.saved()

    def step_begins(self, event: StepBegins) -> None:
        """The modes of the modules as the step has them, whatever an evaluation before a save does."""
        if self._may_be_others:
            self._modules = [module for model in self._training.models for module in unwrapped(model).modules()]
            self._may_be_others = False
        self._modes = list(map(_mode_of, self._modules))

    def modes_of(self, models: Sequence[Any]) -> tuple[bool, ...] | None:
        """Which models were in training mode at the last step; None where that is not known."""
        seen = dict(zip(map(id, self._modules), self._modes, strict=True))
        found = [seen.get(id(unwrapped(model))) for model in models]
        return None if None in found or not found else tuple(map(bool, found))

    def begin(self, live: LiveState, saved: Mapping[str, Any] | None) -> dict[str, Any]:
        """The record right before the first step. What moved in the launch of `saved` is known to move.

        After a reload in this process also what the same models changed since the first record: no load has rebuilt them.
        """
        before, same = self._first, [one() for one in self._models] == list(live.models)
        self._moved = set((saved or {}).get("moved") or ())
        self._may_be_others = True
        self._first, self._models = self._describe(live), [weakref.ref(model) for model in live.models]
        self._feed = self._first["feed"]
        if before and same:
            self._moved |= moved_between(before["model"], self._first["model"])
        left = {"gradients": self._left_over} if self._left_over else {}
        return {**self._first, "moved": sorted(self._moved), **left}

    def record(self, live: LiveState, *, since_save: bool = False) -> dict[str, Any]:
        """The record at a save. Modes are those of the last step, shapes those of the first ones: a save may come after an
        evaluation. `since_save`: shapes of the batches after the last one."""
        now = self._describe(live)
        now["shape"] = self.shapes.to_json(since_save=since_save)
        if not now["feed"]:
            now["feed"] = self._feed  # the loader is not being read
        if self._first:
            first, modes = self._first["model"]["eval"], dict(zip(map(id, self._modules), self._modes, strict=True))
            now["model"]["eval"] = other_mode(live.models, modes) if modes else first
            if now["model"]["eval"] != first:
                now["model"]["eval_first"] = first
            self._may_be_others = True
            self._moved |= moved_between(self._first["model"], now["model"])
            self._moved |= _moved_in(self._first["feed"], now["feed"])
        if live.accumulating:
            now["gradients"] = gradients_of(live.models)
        return {**now, "moved": sorted(self._moved)}

    def _describe(self, live: LiveState) -> dict[str, Any]:
        return {
            "v": VERSION,
            "model": model_record(live.models),
            "feed": feed_record(live.feed),
            "shape": self.shapes.to_json(),
            "arguments": {name: plain for name, one in live.arguments.items() if (plain := plain_value(one)) is not SKIPPED},
            "averages": {name: numbers for name, one in live.averages.items() if (numbers := average_numbers(one))},
            "schedulers": scheduler_states(live),
            "own_schedulers": [i for i, bound in enumerate(live.schedulers) if is_of_another_make(bound.scheduler)],
            "versions": {name: str(getattr(sys.modules[name], "__version__", "")) for name in LIBRARIES if name in sys.modules},
        }


def gradients_of(models: Sequence[Any]) -> dict[str, int]:
    """How many parameters hold a gradient, of how many; {} when none does."""
    flags = [p.grad is not None for model in models for p in unwrapped(model).parameters()]
    return {"held": sum(flags), "parameters": len(flags)} if any(flags) else {}


def average_numbers(average: Any) -> dict[str, float]:
    """The numbers in the functions of an `AveragedModel`: its decay."""
    functions = [function for name in ("multi_avg_fn", "avg_fn") if (function := getattr(average, name, None)) is not None]
    return {name: number for function in functions for name, number in numbers_used_by(inspect.unwrap(function))}


def scheduler_states(live: LiveState) -> list[dict[str, Any]]:
    """The plain fields of every scheduler's `state_dict`, with the arguments of functions that make its LRs."""
    return [_state_of(bound.scheduler) for bound in live.schedulers]


def is_of_another_make(scheduler: Any) -> bool:
    """Whether no known library made this scheduler, or only its empty base: its `load_state_dict` may do anything."""
    for base in type(scheduler).__mro__:
        if base.__module__.partition(".")[0] in MAKERS and base.__name__ not in ("LRScheduler", "_LRScheduler"):
            return False
    return True


def _state_of(scheduler: Any) -> dict[str, Any]:
    try:
        state = scheduler.state_dict()
    except Exception:  # noqa: BLE001 a scheduler of another make; its position and LRs are compared elsewhere
        return {}
    values = dict(_fields(state)) if isinstance(state, Mapping) else {}
    for index, function in enumerate(getattr(scheduler, "lr_lambdas", None) or ()):
        arguments = getattr(function, "keywords", None)  # functools.partial, as Transformers makes them
        for name, value in (arguments or {}).items():
            if (plain := plain_value(value)) is not SKIPPED:
                values[f"function {index}.{name}"] = plain
    return values


def _fields(state: Mapping[str, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    for key, thing in state.items():
        name = str(key)
        if name == "_schedulers" and isinstance(thing, (list, tuple)) and depth < 3:
            for index, inner in enumerate(thing):
                if isinstance(inner, Mapping):
                    yield from _fields(inner, f"{prefix}{index}.", depth + 1)
        elif not name.startswith("_") and name not in APART and (value := plain_value(_number(thing))) is not SKIPPED:
            yield f"{prefix}{name}", value


def _number(thing: Any) -> Any:
    """A tensor of one element on the CPU as its number."""
    if hasattr(thing, "numel") and hasattr(thing, "device"):
        return thing.item() if thing.numel() == 1 and thing.device.type == "cpu" else thing
    return thing


def _moved_in(first: Mapping[str, Any], second: Mapping[str, Any]) -> set[str]:
    """Names of the values of one loader that changed; another dataset is a new one, and says nothing."""
    before, after = feed_values(first), feed_values(second)
    if any(before.get(name) != after.get(name) for name in ("dataset.class", "dataset.length")):
        return set()
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def feed_values(feed: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """Name of a value of dataset and order -> the value, and its section (`dataset_record`, or `order`)."""
    values = {f"order.{name}": (value, "order") for name, value in (feed.get("order") or {}).items()}
    for section, found in (feed.get("dataset") or {}).items():
        values |= {f"dataset.{name}": (value, section) for name, value in found.items()}
    return values


# ---- what differs ------------------------------------------------------------------------------------------------------


class Difference(NamedTuple):
    """One value that is not as it was. `row`: its row in `RULES`, or the heading under which it may differ."""

    row: str
    name: str
    before: Any
    after: Any


# Arguments of a trainer by what they decide: with another value, the same state and batch give another gradient.
OBJECTIVE = re.compile(
    r"label_smoothing|(max|clip)_grad_norm|gradient_(clip|predivide)|prescale|neftune|loss|(^|_)(beta|margin|temperature|gamma|epsilon(_high)?)$"
    r"|^(bf16|fp16|precision|scale_rewards|num_generations|max_(seq_|prompt_|completion_)?length|packing|padding_free)$"
)
NUM_NAMED = 12  # differences of one kind that are named; the rest is counted
MODEL, DATASET, ROWS_OF_DATASET = "attributes of the model", "dataset and order", "rows of the dataset"
ARGUMENTS, BATCHES = "arguments of the trainer", "first batches of this rank"
ENOUGH_BATCHES = 3  # of one length


def check_trained(expected: Expectation, found: Memory, *, same_data: bool = False) -> Iterator[Check]:
    """What is trained, against what was trained at the save. Nothing for a checkpoint that holds no such record."""
    memory, own = expected.memory, found.trained
    saved = memory.trained if memory else {}
    if memory is None or not saved or not own:
        return
    moved = frozenset(saved.get("moved") or ()) | frozenset(own.get("moved") or ())
    yield from _model_checks(expected, saved, own, moved)
    yield from _told(expected, _in_arguments(saved.get("arguments") or {}, own.get("arguments") or {}))
    yield from _told(expected, _in_averages(saved.get("averages") or {}, own.get("averages") or {}))
    yield from _feed_checks(expected, saved, own, moved, same_data)
    has_split = "global_batch" in memory.topology  # the adapter itself knows the samples per step: they are compared as such
    yield from _told(expected, _in_shapes(saved.get("shape") or {}, own.get("shape") or {}, has_split))
    yield from _scheduler_checks(expected, memory, found)
    yield from _gradient_checks(saved, own)


def _told(expected: Expectation, differences: Iterable[Difference]) -> Iterator[Check]:
    """A check for each difference that has a row; the others under one heading are said in one line."""
    groups: dict[str, list[Difference]] = {}
    for one in differences:
        groups.setdefault(one.row, []).append(one)
    for row, group in groups.items():
        more = len(group) - NUM_NAMED
        if row not in RULES:
            code = "M4" if row == ROWS_OF_DATASET else "M6"  # then the resume is not called verified
            texts = [f"{one.name}: {_text(one.before)} → {_text(one.after)}" for one in group[:NUM_NAMED]]
            texts += [f"{more} more"] if more > 0 else []
            yield noted(f"{row} (may differ)", code, where=row, cause="; ".join(texts))
            continue
        for one in group[:NUM_NAMED]:
            yield judge(expected, one.name, one.before, one.after, rule=row)
        if more > 0:
            yield judge(expected, f"{row}, more", "as at the save", f"{more} further values differ", rule=row)


def _text(value: Any) -> str:
    text = "absent" if value is SKIPPED else str(value)
    return text if len(text) <= 120 else text[:117] + "…"


def _equal(name: str, code: str, found: str) -> Check:
    return Check(name=name, code=code, outcome=Outcome.EQUAL, expected="as at the save", found=f"equal, {found}")


# ---- the model -------------------------------------------------------------------------------------------------------


def _model_checks(
    expected: Expectation, saved: Mapping[str, Any], own: Mapping[str, Any], moved: frozenset[str]
) -> Iterator[Check]:
    before, after = saved.get("model") or {}, own.get("model") or {}
    if not before or not after:
        return
    updated = saved.get("versions") != own.get("versions")
    found = [one for one in _in_values(before, after, updated) if pattern_of(one.name) not in moved]
    found += _in_tensors(before.get("tensors") or {}, after.get("tensors") or {}, moved)
    yield from _told(expected, found)
    modes = _in_modes(before.get("eval") or (), after.get("eval") or ())
    if modes and "eval_first" in before and not _in_modes(before["eval_first"], after.get("eval") or ()):
        changes = "; ".join(f"`{name}`: {one} → {other}" for _, name, one, other in modes[:NUM_NAMED])
        cause = f"{changes}: as at the first step of the launch that saved, and not as at its last one"
        yield noted("module_mode", "M6", where=RULES["module_mode"].where, cause=cause)
    else:
        yield from _told(expected, modes)
    if not modes and all(one.row == MODEL for one in found):
        yield _equal("model configuration", "M6", f"{len(before.get('modules') or ())} kinds of modules")


def _in_values(before: Mapping[str, Any], after: Mapping[str, Any], updated: bool) -> Iterator[Difference]:
    """Values of the configuration; a whole stack is one name with `*`. `updated`: by a library of another version."""
    one, other = flat_values(before), flat_values(after)
    absent = (SKIPPED, True)
    for name in sorted(one.keys() | other.keys(), key=lambda name: (pattern_of(name), name)):
        pattern = pattern_of(name)
        if pattern == name and name not in one and _has_members(name, one):
            continue  # that side names the members of this stack one by one
        if pattern == name and name not in other and _has_members(name, other):
            continue
        a, is_firm = one.get(name, one.get(pattern, absent))
        b, is_firm_now = other.get(name, other.get(pattern, absent))
        if is_near(a, b):
            continue
        is_certain = is_firm and is_firm_now and a is not SKIPPED and b is not SKIPPED
        is_renamed = updated and name.endswith("class")
        yield Difference("model" if is_certain and not is_renamed else MODEL, name, a, b)


def _has_members(pattern: str, values: Mapping[str, Any]) -> bool:
    return "*" in pattern and any(name != pattern and pattern_of(name) == pattern for name in values)


def _in_tensors(before: Mapping[str, Any], after: Mapping[str, Any], moved: frozenset[str]) -> Iterator[Difference]:
    """Tensors that no checkpoint holds, as far as they have one shape and did not move; last digits may differ."""
    for name in sorted(before.keys() & after.keys() - moved):
        (*kind, values), (*kind_now, values_now) = before[name], after[name]
        if kind == kind_now and not _are_near(values, values_now):
            yield Difference("model", name, values, values_now)


def _are_near(one: Sequence[float | str], other: Sequence[float | str]) -> bool:
    """Within a thousandth of the largest; infinities and NaN (as text) must be the same."""
    if len(one) != len(other):
        return False
    size = max((abs(value) for value in (*one, *other) if not isinstance(value, str)), default=0.0)
    for a, b in zip(one, other, strict=True):
        if isinstance(a, str) or isinstance(b, str):
            if a != b:
                return False
        elif abs(a - b) > 1e-3 * size:
            return False
    return True


def _in_modes(before: Sequence[str], after: Sequence[str]) -> list[Difference]:
    """Modules that are in another mode, from the names of those in evaluation mode."""
    found = [Difference("module_mode", name, "training", "evaluation") for name in _only(after, before)]
    return found + [Difference("module_mode", name, "evaluation", "training") for name in _only(before, after)]


def _only(here: Sequence[str], there: Sequence[str]) -> list[str]:
    known = set(there)
    return [name for name in here if name not in known and pattern_of(name) not in known]


def _in_arguments(saved: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[Difference]:
    """Arguments of the trainer; those that say how loss and gradient are made must be equal."""
    for name in sorted(saved.keys() & own.keys()):
        if not is_near(saved[name], own[name]):
            yield Difference("trainer" if OBJECTIVE.search(name) else ARGUMENTS, name, saved[name], own[name])


def _in_averages(saved: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[Difference]:
    """How an average forgets; its weights are compared apart."""
    for name in sorted(saved.keys() & own.keys()):
        for key in sorted(saved[name].keys() & own[name].keys()):
            if not is_near(saved[name][key], own[name][key]):
                yield Difference("average", f"{name}.{key}", saved[name][key], own[name][key])


# ---- data ------------------------------------------------------------------------------------------------------------


def _feed_checks(
    expected: Expectation, saved: Mapping[str, Any], own: Mapping[str, Any], moved: frozenset[str], same_data: bool
) -> Iterator[Check]:
    before, after = feed_values(saved.get("feed") or {}), feed_values(own.get("feed") or {})
    if not before or not after:
        return
    found = []
    for name in sorted(before.keys() | after.keys() - moved):
        (one, section), (other, section_now) = before.get(name, (SKIPPED, "")), after.get(name, (SKIPPED, ""))
        if name not in moved and not is_near(one, other):
            section = section if section == section_now else ""
            found.append(Difference(_row_of(name, section, one, other, same_data), name, one, other))
    yield from _told(expected, found)
    if all(one.row not in RULES for one in found):
        yield _equal("dataset", "M6", f"{len(before)} values")


def _row_of(name: str, section: str, one: Any, other: Any, same_data: bool) -> str:
    """The row of a value of dataset and order. `section`: where both records have it; "" where one of them lacks it."""
    if name == "order.shuffle" and section:
        return "shuffle"
    if section == "firm" or (section == "files" and _sizes(one) != _sizes(other)):
        return "dataset"
    if section == "content":
        return "dataset" if same_data else ROWS_OF_DATASET
    return DATASET


def _sizes(files: Iterable[Any]) -> list[Any]:
    return sorted(file[1] for file in files if file[1] is not None)


def _in_shapes(saved: Mapping[str, Any], own: Mapping[str, Any], has_split: bool) -> Iterator[Difference]:
    """Shapes that three batches of the saved launch had in common, and the first batches of this one."""
    is_usual = saved.get("batches", 0) >= ENOUGH_BATCHES
    both = {key for key in ("length", "rows", "autocast") if saved.get(key) is not None and own.get(key) is not None}
    changed = {key: (saved[key], own[key]) for key in both if saved[key] != own[key]}
    if "length" in changed:
        yield Difference("sequence_length" if is_usual else "tokens of the first batches", LENGTH, *changed["length"])
    if "rows" in changed and not has_split:
        one, other = changed["rows"]
        is_more = other > one  # a smaller one may be the last of its epoch
        yield Difference("global_batch" if is_more and is_usual else BATCHES, ROWS, one, other)
    if "autocast" in changed:
        yield Difference("autocast", "autocast", *changed["autocast"])


# ---- schedulers and gradients ----------------------------------------------------------------------------------------


def _scheduler_checks(expected: Expectation, memory: Memory, found: Memory) -> Iterator[Check]:
    saved, own = memory.trained.get("schedulers") or (), found.trained.get("schedulers") or ()
    if len(saved) != len(own):
        return  # the schedulers themselves are compared by `check_memory`
    for index, (before, after) in enumerate(zip(saved, own, strict=True)):
        prefix = f"scheduler {index}." if len(saved) > 1 else "scheduler."
        is_own = index in (found.trained.get("own_schedulers") or ()) and _is_in_place(memory, found, index)
        row = f"state of scheduler {index}, of another make" if is_own else "scheduler_state"
        changed = [
            Difference(row, f"{prefix}{name}", before[name], after[name])
            for name in sorted(before.keys() & after.keys())
            if not name.startswith("function ") and not is_near(before[name], after[name])
        ]
        if expected.contract is not None:
            changed = [one for one in changed if "lr" not in one.name and not _is_scaled(expected, one)]
        yield from _told(expected, changed)
        if before and not changed:
            yield _equal("scheduler state", "M1", f"{len(before)} fields")


def _is_in_place(memory: Memory, found: Memory, index: int) -> bool:
    """Whether a scheduler stands where it stood; one without a position, whether the LRs are those of the save."""
    if index >= len(memory.schedulers) or index >= len(found.schedulers):
        return False
    before, after = memory.schedulers[index].last_epoch, found.schedulers[index].last_epoch
    if before is not None or after is not None:
        return before == after
    lrs, lrs_now = ([group.lr for group in one.groups] for one in (memory, found))
    return len(lrs) == len(lrs_now) and all(is_near(a, b) for a, b in zip(lrs, lrs_now, strict=True))


def _is_scaled(expected: Expectation, one: Difference) -> bool:
    """Whether a rollback scaled this value with the LR (`eta_min` is an LR by another name)."""
    ratio = expected.contract.lr_ratio if expected.contract else None
    return ratio is not None and isinstance(one.before, float) and is_near(one.before * ratio, one.after)


def _gradient_checks(saved: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[Check]:
    if left := own.get("gradients"):
        yield noted(
            "gradients left over",
            "M1",
            expected="no gradients before the first batch",
            found=f"{left['held']} of {left['parameters']} parameters hold one",
            where="model, before the first batch",
            cause="unless the script clears them first, they are added to the first step: `optimizer.zero_grad()`",
        )
    if left := saved.get("gradients"):
        yield noted(
            "unfinished accumulation",
            "M1",
            expected=f"gradients of {left['held']} of {left['parameters']} parameters, accumulated before the save",
            found="none: checkpoints do not hold them",
            where="model, at the save",
            cause="the samples of the unfinished step count for nothing",
        )

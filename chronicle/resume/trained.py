"""What is trained, as the guard records it at a save and compares it at a resume: the field `trained` of `Memory`.

It holds the configuration of the models (`configuration.py`), dataset, order and shape of the batches (`feed.py`), the full
state of the schedulers, and gradients that were left over. `TrainedWatch` makes the record before the first step and again at
every save, so that values which move while a launch trains (counters, caches, annealed factors) are known and not compared.
Nothing is done at a step.

A difference that is refused is named value by value (`transformer.h.0.attn.dropout.p: 0.1 → 0.0`) and can be accepted by its
name. docs/guard.md says what may differ. Codes: M1 state, M3 topology, M6 what is trained.
"""

import inspect
import math
import re
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

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
from chronicle.resume.feed import LENGTH, ROWS, Shapes, feed_record
from chronicle.resume.fingerprint import LiveState
from chronicle.resume.horizon import numbers_used_by
from chronicle.resume.memory import Memory

VERSION = 1
LIBRARIES = ("torch", "transformers", "diffusers", "peft", "timm", "lightning", "accelerate")
MAKERS = ("torch", "transformers", "diffusers", "deepspeed", "accelerate", "lightning", "pytorch_lightning")  # of schedulers
# compared elsewhere (position, LRs), or no part of the state
APART = {"last_epoch", "step_count", "last_lr", "verbose", "optimizer", "lr_lambdas", "num_steps"}


class TrainedWatch:
    """The record of one launch, and which of its values move as it trains."""

    def __init__(self) -> None:
        self.shapes = Shapes()
        self._first: dict[str, Any] = {}
        self._feed: dict[str, Any] = {}
        self._moved: set[str] = set()
        self._left_over: dict[str, int] = {}
        self._models: list[weakref.ref[Any]] = []  # of the record of this launch
        self._modules: list[Any] = []  # of the models, in their order
        self._may_be_others = True  # the script may have put other modules into a model meanwhile
        self._modes: list[bool] = []  # of these modules, right before the last step

    def first_batch(self, live: LiveState) -> None:
        """The first batch is about to enter the model: gradients that exist now belong to no step of this launch."""
        self._left_over = gradients_of(live.models)

    def stepping(self, models: Sequence[Any]) -> None:
        """Right before a step: the modes of the modules as the step has them, whatever an evaluation before a save does."""
        if self._may_be_others:
            self._modules = [module for model in models for module in unwrapped(model).modules()]
            self._may_be_others = False
        self._modes = [module.training for module in self._modules]

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


def is_near(a: Any, b: Any) -> bool:
    """Whether two plain values are equal; numbers within rounding."""
    if isinstance(a, (int, float)) and isinstance(b, (int, float)) and not isinstance(a, bool) and not isinstance(b, bool):
        return a == b or math.isclose(a, b, rel_tol=1e-9, abs_tol=0.0)
    return bool(a == b)


# ---- what may differ, and what happens ---------------------------------------------------------------------------------


# Arguments of a trainer by what they decide: with another value, the same state and batch give another gradient.
OBJECTIVE = re.compile(
    r"label_smoothing|(max|clip)_grad_norm|gradient_(clip|predivide)|prescale|neftune|loss|(^|_)(beta|margin|temperature|gamma|epsilon(_high)?)$"
    r"|^(bf16|fp16|precision|scale_rewards|num_generations|max_(seq_|prompt_|completion_)?length|packing|padding_free)$"
)
NUM_NAMED = 12  # differences of one kind that are named; the rest is counted


def check_trained(expected: Expectation, found: Memory, *, same_data: bool = False) -> Iterator[Check]:
    """What is trained, against what was trained at the save. Nothing for a checkpoint that holds no such record."""
    saved, own = (expected.memory.trained if expected.memory else {}), found.trained
    if not saved or not own:
        return
    yield from _model_checks(expected, saved, own)
    yield from _tensor_checks(expected, saved, own)
    yield from _argument_checks(expected, saved.get("arguments") or {}, own.get("arguments") or {})
    yield from _average_checks(expected, saved.get("averages") or {}, own.get("averages") or {})
    yield from _feed_checks(expected, saved, own, same_data)
    yield from _shape_checks(expected, saved.get("shape") or {}, own.get("shape") or {})
    one, other = (record.get("shape", {}).get("autocast") for record in (saved, own))
    if one is not None and other is not None and one != other:
        cause = "the script enters another `autocast` before the model"
        yield from _verdicts(expected, "autocast", "M3", [("autocast", one, other)], "first batches of this rank", cause)
    yield from _scheduler_checks(expected, saved, own, found)
    yield from _gradient_checks(saved, own)


# ---- the model -------------------------------------------------------------------------------------------------------


def _model_checks(expected: Expectation, saved: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[Check]:
    before, after = saved.get("model") or {}, own.get("model") or {}
    if not before or not after:
        return
    moved = frozenset(saved.get("moved") or ()) | frozenset(own.get("moved") or ())
    updated = saved.get("versions") != own.get("versions")
    firm: list[tuple[str, Any, Any]] = []
    loose: list[tuple[str, Any, Any]] = []
    for name, one, other in _differences(before, after):
        if pattern_of(name) in moved:
            continue
        one_sided = SKIPPED in (one[0], other[0])
        certain = one[1] and other[1] and not one_sided and not (updated and name.endswith("class"))
        (firm if certain else loose).append((name, one[0], other[0]))
    cause = "the model was built or changed with another configuration"
    yield from _verdicts(expected, "model", "M6", firm, "configuration of the model", cause)
    yield from _notes("M6", loose, "attributes of the model")
    modes = _modes(before.get("eval"), after.get("eval"))
    where = "mode of the modules at the first step"
    if modes and "eval_first" in before and not _modes(before["eval_first"], after.get("eval")):
        yield _as_at_its_first_step(modes, where)  # a script that changes modes as it trains may do so in each launch
    else:
        cause = "this part of the model was left in another mode: `model.train()`, or as the script had it"
        yield from _verdicts(expected, "module_mode", "M6", modes, where, cause)
    if not firm and not modes:
        yield _equal("model configuration", "M6", f"{len(before.get('modules') or ())} kinds of modules")


def _tensor_checks(expected: Expectation, saved: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[Check]:
    """Tensors that no checkpoint holds, as far as they have one shape and did not move; last digits may differ."""
    before, after = ((record.get("model") or {}).get("tensors") or {} for record in (saved, own))
    moved = frozenset(saved.get("moved") or ()) | frozenset(own.get("moved") or ())
    changes = [
        (name, before[name][2], after[name][2])
        for name in sorted(before.keys() & after.keys() - moved)
        if before[name][:2] == after[name][:2] and not _are_near(before[name][2], after[name][2])
    ]
    cause = "a tensor that no checkpoint holds was made otherwise"
    yield from _verdicts(expected, "model", "M6", changes, "tensors of the model that are not saved", cause)


def _are_near(one: Sequence[float | str], other: Sequence[float | str]) -> bool:
    """Within a thousandth of the largest; infinities and NaN (as text) must be the same."""
    size = max((abs(value) for value in (*one, *other) if not isinstance(value, str)), default=0.0)
    return len(one) == len(other) and all(
        a == b if isinstance(a, str) or isinstance(b, str) else abs(a - b) <= 1e-3 * size
        for a, b in zip(one, other, strict=True)
    )


def _argument_checks(expected: Expectation, saved: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[Check]:
    """Arguments of the trainer that say how loss and gradient are made; one of another kind is only noted."""
    names = sorted(saved.keys() & own.keys())
    changes = [(name, saved[name], own[name]) for name in names if not is_near(saved[name], own[name])]
    firm = [change for change in changes if OBJECTIVE.search(change[0])]
    cause = "the trainer's arguments were changed"
    yield from _verdicts(expected, "trainer", "M6", firm, "arguments of the trainer", cause)
    yield from _notes("M6", [change for change in changes if change not in firm], "arguments of the trainer")


def _average_checks(expected: Expectation, saved: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[Check]:
    """How an average forgets; its weights are compared apart."""
    both = [(name, key) for name in saved.keys() & own.keys() for key in saved[name].keys() & own[name].keys()]
    changes = [(f"{name}.{key}", saved[name][key], own[name][key]) for name, key in sorted(both)]
    changes = [change for change in changes if not is_near(change[1], change[2])]
    cause = "the average is made with another function or number"
    yield from _verdicts(expected, "average", "M6", changes, "function of the averaged copy", cause)


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """(name, value before, value after) with their firmness; a whole stack is one name with `*`."""
    one, other = flat_values(before), flat_values(after)
    absent = (SKIPPED, True)
    for name in sorted(one.keys() | other.keys(), key=lambda name: (pattern_of(name), name)):
        pattern = pattern_of(name)
        folded = [pattern != name and name not in values and pattern in values for values in (one, other)]
        if any(folded):
            a, b = one.get(name, one.get(pattern, absent)), other.get(name, other.get(pattern, absent))
        elif "*" in name and (name in one) != (name in other) and _has_members(name, other if name in one else one):
            continue  # the other side names the members of this stack one by one
        else:
            a, b = one.get(name, absent), other.get(name, absent)
        if not is_near(a[0], b[0]):
            yield name, a, b


def _has_members(pattern: str, values: Mapping[str, Any]) -> bool:
    return any(name != pattern and pattern_of(name) == pattern for name in values)


def _modes(before: Sequence[str] | None, after: Sequence[str] | None) -> list[tuple[str, str, str]]:
    """Modules that are in another mode, with both modes, from the names of those in evaluation mode."""
    back, forth = _only(before or (), after or ()), _only(after or (), before or ())
    return [(name, "training", "evaluation") for name in forth] + [(name, "evaluation", "training") for name in back]


def _only(here: Sequence[str], there: Sequence[str]) -> list[str]:
    known = set(there)
    return [name for name in here if name not in known and pattern_of(name) not in known]


def _as_at_its_first_step(modes: Sequence[tuple[str, str, str]], where: str) -> Check:
    changes = "; ".join(f"`{name}`: {one} → {other}" for name, one, other in modes[:NUM_NAMED])
    cause = f"{changes}: as at the first step of the launch that saved, and not as at its last one"
    return noted("module_mode", "M6", where=where, cause=cause)


# ---- data ------------------------------------------------------------------------------------------------------------


def _feed_checks(expected: Expectation, saved: Mapping[str, Any], own: Mapping[str, Any], same_data: bool) -> Iterator[Check]:
    before, after = feed_values(saved.get("feed") or {}), feed_values(own.get("feed") or {})
    if not before or not after:
        return
    moved = frozenset(saved.get("moved") or ()) | frozenset(own.get("moved") or ())
    refused: list[tuple[str, Any, Any]] = []
    loose: list[tuple[str, Any, Any]] = []
    order: list[tuple[str, Any, Any]] = []
    rows: list[tuple[str, Any, Any]] = []
    for name in sorted(before.keys() | after.keys()):
        (one, section), (other, section_now) = before.get(name, (SKIPPED, "")), after.get(name, (SKIPPED, ""))
        if name in moved or is_near(one, other):
            continue
        if SKIPPED in (one, other):
            loose.append((name, one, other))
        elif name == "order.shuffle":
            order.append((name, one, other))
        elif section == "files":
            sizes = [[file[:2] for file in files] for files in (one, other)]
            (refused if sizes[0] != sizes[1] and _sizes(one) != _sizes(other) else loose).append((name, one, other))
        elif section == "content" == section_now:
            (refused if same_data else rows).append((name, one, other))
        elif section == "firm" == section_now:
            refused.append((name, one, other))
        else:
            loose.append((name, one, other))
    cause = "another dataset, or another part of it, is trained on"
    yield from _verdicts(expected, "dataset", "M6", refused, "dataset of the loader that is trained from", cause)
    cause = "the loader was built with another `shuffle`"
    yield from _verdicts(expected, "shuffle", "M6", order, "sampler of the loader", cause)
    yield from _notes("M4", rows, "rows of the dataset")  # said, and the resume is not called verified
    yield from _notes("M6", loose, "dataset and order")
    if not refused and not order:
        yield _equal("dataset", "M6", f"{len(before)} values")


def _sizes(files: Iterable[Any]) -> list[Any]:
    return sorted(file[1] for file in files if file[1] is not None)


def _shape_checks(expected: Expectation, saved: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[Check]:
    """A length that three batches of the saved launch had in common, and the first batches of this one."""
    long_enough = saved.get("batches", 0) >= 3
    one, other = saved.get("length"), own.get("length")
    if one is not None and other is not None and one != other:
        change = [(LENGTH, one, other)]
        cause = "the sequences are cut at another length"
        if long_enough:
            yield from _verdicts(expected, "sequence_length", "M6", change, "tokens of the first batches", cause)
        else:
            yield from _notes("M6", change, "tokens of the first batches")
    one, other = saved.get("rows"), own.get("rows")
    if one is not None and other is not None and one != other and not _known_split(expected):
        change = [(ROWS, one, other)]
        if other > one and long_enough:  # a smaller one may be the last of its epoch
            cause = "the batch size was changed; a smaller accumulation that makes up for it must be accepted"
            yield from _verdicts(expected, "global_batch", "M3", change, "first batches of this rank", cause)
        else:
            yield from _notes("M6", change, "first batches of this rank")


def _known_split(expected: Expectation) -> bool:
    """Whether the adapter itself knows the samples per step, which is then compared as such."""
    return bool(expected.memory and "global_batch" in expected.memory.topology)


# ---- schedulers and gradients ----------------------------------------------------------------------------------------


def _scheduler_checks(
    expected: Expectation, saved: Mapping[str, Any], own: Mapping[str, Any], found: Memory
) -> Iterator[Check]:
    before, after = saved.get("schedulers") or (), own.get("schedulers") or ()
    if len(before) != len(after):
        return  # the schedulers themselves are compared by `check_memory`
    by_rollback = expected.contract is not None
    for index, (one, other) in enumerate(zip(before, after, strict=True)):
        prefix = f"scheduler {index}." if len(before) > 1 else "scheduler."
        changes = [
            (f"{prefix}{name}", one[name], other[name])
            for name in one
            if name in other
            and not is_near(one[name], other[name])
            and not (by_rollback and ("lr" in name or _is_scaled(expected, one[name], other[name])))
        ]
        state = [change for change in changes if "function " not in change[0]]
        if index in (own.get("own_schedulers") or ()) and _is_in_place(expected.memory, found, index):
            yield from _notes("M1", state, f"state of scheduler {index}, of another make")
        else:
            cause = "the scheduler's state was not restored, or changed after the load"
            yield from _verdicts(expected, "scheduler_state", "M1", state, "state_dict() of the scheduler", cause)
        if one and not state:
            yield _equal("scheduler state", "M1", f"{len(one)} fields")


def _is_in_place(memory: Memory | None, found: Memory, index: int) -> bool:
    """Whether a scheduler stands where it stood; one without a position, whether the LRs are those of the save."""
    if memory is None or index >= len(memory.schedulers) or index >= len(found.schedulers):
        return False
    before, after = memory.schedulers[index].last_epoch, found.schedulers[index].last_epoch
    if before is not None or after is not None:
        return before == after
    lrs = [[group.lr for group in one.groups] for one in (memory, found)]
    return len(lrs[0]) == len(lrs[1]) and all(is_near(a, b) for a, b in zip(*lrs, strict=True))


def _is_scaled(expected: Expectation, before: Any, after: Any) -> bool:
    """Whether a rollback scaled this value with the LR (`eta_min` is an LR by another name)."""
    ratio = expected.contract.lr_ratio if expected.contract else None
    return ratio is not None and isinstance(before, float) and is_near(before * ratio, after)


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


# ---- from differences to checks --------------------------------------------------------------------------------------


def _verdicts(
    expected: Expectation, row: str, code: str, changes: list[tuple[str, Any, Any]], where: str, cause: str
) -> Iterator[Check]:
    """One check for each difference: refused, or noted when the row or the value itself is accepted."""
    for name, one, other in changes[:NUM_NAMED]:
        accepted = expected.accepts(row) or expected.accepts(name)
        allowed = f"{_text(one)} → {_text(other)}, accepted as `{row}`"
        yield Check(
            name=name,
            code=code,
            outcome=Outcome.NOTED if accepted else Outcome.DIFFERENT,
            expected=_text(one),
            found=_text(other),
            where=where,
            cause=allowed if accepted else f'{cause}; if that is intended, accept "{row}: why"',
        )
    if len(changes) > NUM_NAMED:
        more = f"{len(changes) - NUM_NAMED} further values differ"
        outcome = Outcome.NOTED if expected.accepts(row) else Outcome.DIFFERENT
        yield Check(name=f"{row}, more", code=code, outcome=outcome, found=more, where=where)


def _notes(code: str, changes: list[tuple[str, Any, Any]], where: str) -> Iterator[Check]:
    """One check for all of them: they are said in one line."""
    if changes:
        texts = [f"{name}: {_text(one)} → {_text(other)}" for name, one, other in changes[:NUM_NAMED]]
        more = [f"{len(changes) - NUM_NAMED} more"] if len(changes) > NUM_NAMED else []
        yield noted(f"{where} (may differ)", code, where=where, cause="; ".join([*texts, *more]))


def _equal(name: str, code: str, found: str) -> Check:
    return Check(name=name, code=code, outcome=Outcome.EQUAL, expected="as at the save", found=f"equal, {found}")


def _text(value: Any) -> str:
    if value is SKIPPED:
        return "absent"
    text = str(value)
    return text if len(text) <= 120 else text[:117] + "…"

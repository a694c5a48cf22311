"""What is trained, as the guard records it at a save and compares it at a resume: the field `trained` of `Memory`.

Flat facts (row -> name -> value) say what the models are (`configuration.py`), dataset and order (`feed.py`), the trainer's
arguments, how averages forget, and the state of the schedulers. Beside them stand modes,
the shape of the batches, and gradients that were left over. `TrainedWatch` makes the record before the first step and again at
every save, so that values which move while a launch trains (counters, caches, annealed factors) are known and not compared.
Nothing is done at a step.

Only what must not differ is recorded. A difference is named value by value (`transformer.h.0.attn.dropout.p: 0.1 → 0.0`) and
can be accepted by its name or that of its row in `rules.py`. Other rows of a data set are said in one line.
"""

import inspect
import operator
import re
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from chronicle.resume.checks.check import Check, not_compared, noted
from chronicle.resume.configuration import (
    FIRM,
    SKIPPED,
    TENSOR,
    Fact,
    Facts,
    folded,
    model_facts,
    other_mode,
    pattern_of,
    plain_value,
    quietly,
    unwrapped,
)
from chronicle.resume.contract import Expectation
from chronicle.resume.events import BatchEntered, Saved, StepBegins
from chronicle.resume.feed import LENGTH, ROWS, ROWS_OF_DATASET, Shapes, feed_facts
from chronicle.resume.fingerprint import LiveState
from chronicle.resume.horizon import numbers_used_by
from chronicle.resume.hub import RESTS, Observer, Rest
from chronicle.resume.memory import Memory
from chronicle.resume.rules import RULES, is_near, judge
from chronicle.resume.training import Training

VERSION = 4
LIBRARIES = ("torch", "transformers", "diffusers", "peft", "timm", "lightning", "accelerate")
MAKERS = ("torch", "transformers", "diffusers", "deepspeed", "accelerate", "lightning", "pytorch_lightning")  # of schedulers
# compared elsewhere (position, LRs), or no part of the state
APART = {"last_epoch", "step_count", "last_lr", "verbose", "optimizer", "lr_lambdas", "num_steps"}
BATCHES = "first batches of this rank"
SCHEDULER = "scheduler_state"
OF_DATA = ("dataset", "shuffle", ROWS_OF_DATASET)


_mode_of = operator.attrgetter("training")


class TrainedWatch(Observer):
    """The record of one launch, and which of its values move as it trains."""

    about = "what is trained"

    def __init__(self, training: Training) -> None:
        self._training = training
        self.shapes = Shapes()
        self._first: dict[str, Any] = {}
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

    def begin(self, live: LiveState, saved: Mapping[str, Any] | None) -> dict[str, Any]:
        """The record right before the first step. What moved in the launch of `saved` is known to move.

        After a reload in this process also what the same models changed since the first record: no load has rebuilt them.
        """
        before, same = self._first, [one() for one in self._models] == list(live.models)
        self._moved = set((saved or {}).get("moved") or ())
        self._may_be_others = True
        self._first, self._models = self._describe(live), [weakref.ref(model) for model in live.models]
        if before and same:
            self._moved |= moved_between(before["facts"], self._first["facts"])
        left = {"gradients": self._left_over} if self._left_over else {}
        return {**self._first, "moved": sorted(self._moved), **left}

    def record(self, live: LiveState, *, since_save: bool = False) -> dict[str, Any]:
        """The record at a save. Modes are those of the last step, shapes those of the first ones: a save may come after an
        evaluation. `since_save`: shapes of the batches after the last one."""
        now = self._describe(live)
        now["shape"] = self.shapes.to_json(since_save=since_save)
        if self._first:
            if not any(row in now["facts"] for row in OF_DATA):  # the loader is not being read
                now["facts"] |= {row: kept for row, kept in self._first["facts"].items() if row in OF_DATA}
            modes = dict(zip(map(id, self._modules), self._modes, strict=True))
            for name in ("eval", "training"):
                now[name] = self._first[name]
            if modes:
                now["eval"] = other_mode(live.models, modes)
                now["training"] = [modes.get(id(unwrapped(model)), bool(model.training)) for model in live.models]
            if now["eval"] != self._first["eval"]:
                now["eval_first"] = self._first["eval"]
            self._may_be_others = True
            self._moved |= moved_between(self._first["facts"], now["facts"])
        if live.accumulating:
            now["gradients"] = gradients_of(live.models)
        return {**now, "moved": sorted(self._moved)}

    def _describe(self, live: LiveState) -> dict[str, Any]:
        return {
            "v": VERSION,
            "facts": folded(_facts_of(live)),
            "eval": other_mode(live.models),
            "training": [bool(model.training) for model in live.models],
            "shape": self.shapes.to_json(),
            "versions": {name: str(getattr(sys.modules[name], "__version__", "")) for name in LIBRARIES if name in sys.modules},
        }


def _facts_of(live: LiveState) -> Iterator[Fact]:
    yield from model_facts(live.models)
    yield from feed_facts(live.feed)
    for name, one in live.arguments.items():
        if OBJECTIVE.search(name) and not ELSEWHERE.search(name) and (plain := plain_value(one)) is not SKIPPED:
            yield "trainer", name, plain
    for name, average in live.averages.items():
        for key, number in average_numbers(average).items():
            yield "average", f"{name}.{key}", number
    for index, bound in enumerate(live.schedulers):
        prefix = f"scheduler {index}." if len(live.schedulers) > 1 else "scheduler."
        state = None if is_of_another_make(bound.scheduler) else quietly(getattr(bound.scheduler, "state_dict", dict))
        for key, value in _fields(state) if isinstance(state, Mapping) else ():
            yield SCHEDULER, prefix + key, value


def moved_between(first: Facts, second: Facts) -> set[str]:
    """Names (with `*` for places in a stack) of the values of models and dataset that differ between two records of a launch.

    Another dataset is a new one, and says nothing.
    """
    before, after = _by_name(first), _by_name(second)
    names = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    is_new = any(("dataset", f"dataset.{key}") in names for key in ("class", "length"))
    rows = (FIRM, TENSOR) if is_new else (FIRM, TENSOR, *OF_DATA)
    return {pattern_of(name) for row, name in names if row in rows}


def _by_name(facts: Mapping[str, Mapping[str, Any]]) -> dict[tuple[str, str], Any]:
    """(row, name of a fact) -> value."""
    return {(row, name): value for row, values in facts.items() for name, value in values.items()}


def gradients_of(models: Sequence[Any]) -> dict[str, int]:
    """How many parameters hold a gradient, of how many; {} when none does."""
    flags = [p.grad is not None for model in models for p in unwrapped(model).parameters()]
    return {"held": sum(flags), "parameters": len(flags)} if any(flags) else {}


def average_numbers(average: Any) -> dict[str, float]:
    """The numbers in the functions of an `AveragedModel`: its decay."""
    functions = [function for name in ("multi_avg_fn", "avg_fn") if (function := getattr(average, name, None)) is not None]
    return {name: number for function in functions for name, number in numbers_used_by(inspect.unwrap(function))}


def is_of_another_make(scheduler: Any) -> bool:
    """Whether no known library made this scheduler, or only its empty base: its `load_state_dict` may do anything.

    What it keeps is not compared, then; its position and the LRs of the next steps are.
    """
    for base in type(scheduler).__mro__:
        if base.__module__.partition(".")[0] in MAKERS and base.__name__ not in ("LRScheduler", "_LRScheduler"):
            return False
    return True


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


# ---- what differs ------------------------------------------------------------------------------------------------------


class Difference(NamedTuple):
    """One value that is not as it was. `row`: its row in `RULES`, or the heading under which it may be."""

    row: str
    name: str
    before: Any
    after: Any


ELSEWHERE = re.compile(r"eval|prediction|adam|optim|^log")  # of an evaluation, or an option of the optimizer
# Arguments of a trainer by what they decide: with another value, the same state and batch give another gradient.
OBJECTIVE = re.compile(
    r"label_smoothing|(max|clip)_grad_norm|gradient_(clip|predivide)|prescale|neftune|loss|(^|_)(beta|margin|temperature|gamma|epsilon(_high)?)$"
    r"|^(bf16|fp16|precision|scale_rewards|num_generations|max_(seq_|prompt_|completion_)?length|packing|padding_free)$"
)
EQUALS = (  # a row that says what was compared: its name, code, and the rows of the facts
    ("model configuration", "M6", (FIRM, TENSOR)),
    ("dataset", "M6", ("dataset", "shuffle")),
    ("scheduler state", "M1", (SCHEDULER,)),
)
NUM_NAMED = 12  # differences of one kind that are named; the rest is counted
ENOUGH_BATCHES = 3  # of one length


def check_trained(expected: Expectation, found: Memory, *, same_data: bool = False) -> Iterator[Check]:
    """What is trained, against what was trained at the save. Nothing for a checkpoint that holds no such record."""
    memory, own = expected.memory, found.trained
    saved = memory.trained if memory else {}
    if memory is None or not saved or not own:
        return
    if saved.get("v") != own.get("v"):
        yield not_compared("what is trained", "M6", "it was recorded by another version of chronicle")
        return
    differences = list(_differences(expected, saved, found, same_data))
    yield from _told(expected, differences)
    before, after = (record.get("facts") or {} for record in (saved, own))
    for what, code, rows in EQUALS:
        num = sum(len(before[row]) for row in rows if row in before and row in after)
        if num and not any(one.row in rows for one in differences):
            yield Check(name=what, code=code, expected="as at the save", found=f"equal, {num} values")
    yield from _mode_checks(expected, saved, own)
    has_split = "global_batch" in memory.topology  # the adapter itself knows the samples per step: they are compared as such
    yield from _told(expected, _in_shapes(saved.get("shape") or {}, own.get("shape") or {}, has_split))
    yield from _gradient_checks(saved, own)


def _differences(expected: Expectation, saved: Mapping[str, Any], found: Memory, same_data: bool) -> Iterator[Difference]:
    """The facts that are others now; a whole stack is one name with `*`. What moves by itself is not compared."""
    one, other = (_by_name(record.get("facts") or {}) for record in (saved, found.trained))
    moved = {*(saved.get("moved") or ()), *(found.trained.get("moved") or ())}
    updated = saved.get("versions") != found.trained.get("versions")
    memory = expected.memory
    other_schedulers = memory is None or len(memory.schedulers) != len(found.schedulers)  # which is compared elsewhere
    for row, name in sorted(one.keys() | other.keys(), key=lambda key: (key[0], pattern_of(key[1]), key[1])):
        stack = row, pattern_of(name)
        before, after = (facts.get((row, name), facts.get(stack, SKIPPED)) for facts in (one, other))
        if stack[1] in moved or before is SKIPPED or after is SKIPPED:  # a library of another version has more, or fewer
            continue
        if row == SCHEDULER and (other_schedulers or _is_of_a_rollback(expected, name, before, after)):
            continue
        if row == FIRM and updated and name.endswith("class"):
            continue
        if row == TENSOR:
            if not _are_near_tensors(before, after):
                yield Difference(FIRM, name, before, after)
        elif not is_near(before, after):
            yield Difference("dataset" if row == ROWS_OF_DATASET and same_data else row, name, before, after)


def _is_of_a_rollback(expected: Expectation, name: str, before: Any, after: Any) -> bool:
    """Whether a field of a scheduler is what a rollback changed: `eta_min` is an LR by another name."""
    if expected.contract is None:
        return False
    ratio = expected.contract.lr_ratio
    return "lr" in name or (ratio is not None and isinstance(before, float) and is_near(before * ratio, after))


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


def _are_near_tensors(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Within a thousandth of the largest; infinities and NaN (as text) must be the same. Other shapes are not compared."""
    if one[:2] != other[:2]:
        return True
    size = max((abs(value) for value in (*one[2], *other[2]) if not isinstance(value, str)), default=0.0)
    for a, b in zip(one[2], other[2], strict=True):
        if isinstance(a, str) or isinstance(b, str):
            if a != b:
                return False
        elif abs(a - b) > 1e-3 * size:
            return False
    return True


# ---- modes -----------------------------------------------------------------------------------------------------------


def _mode_checks(expected: Expectation, saved: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[Check]:
    """The models and their modules are in the mode of the last step before the save."""
    if own.get("training") and len(saved.get("training") or ()) == len(own["training"]):
        yield judge(expected, "training mode", *map(_words, (saved["training"], own["training"])))
    after = own.get("eval") or ()
    modes = _in_modes(saved.get("eval") or (), after)
    if not modes or "eval_first" not in saved or _in_modes(saved["eval_first"], after):
        yield from _told(expected, modes)
        return
    changes = "; ".join(f"`{name}`: {one} → {other}" for _, name, one, other in modes[:NUM_NAMED])
    cause = f"{changes}: as at the first step of the launch that saved, and not as at its last one"
    yield noted("module_mode", "M6", where=RULES["module_mode"].where, cause=cause)


def _words(modes: Sequence[bool]) -> str:
    return ", ".join("training" if mode else "evaluation" for mode in modes)


def _in_modes(before: Sequence[str], after: Sequence[str]) -> list[Difference]:
    """Modules that are in another mode, from the names of those in evaluation mode."""
    found = [Difference("module_mode", name, "training", "evaluation") for name in _only(after, before)]
    return found + [Difference("module_mode", name, "evaluation", "training") for name in _only(before, after)]


def _only(here: Sequence[str], there: Sequence[str]) -> list[str]:
    known = set(there)
    return [name for name in here if name not in known and pattern_of(name) not in known]


# ---- batches ---------------------------------------------------------------------------------------------------------


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


# ---- gradients ---------------------------------------------------------------------------------------------------------


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

"""THE table of the guard's comparisons: for each value what it is, where it lies, what may have gone wrong, how it is accepted.

`judge` compares one value by its row. A value that was saved as part of the state has no name by which it could be accepted: it
is restored. A difference that a person accepted by name is noted. docs/guard.md shows the same table to readers; a test holds
the two together.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chronicle.resume.checks.check import Check, Outcome
from chronicle.resume.contract import Expectation

SAME = 1e-9  # relative tolerance: the same program on the same state


@dataclass(frozen=True, slots=True)
class Rule:
    """One row. `cause` is the likely one, where nothing more is known; `accepted` the name by which a person accepts it."""

    code: str  # kind of the check: M1 state, M2 learning rates, M3 topology, M5 identity of objects, M6 what is trained
    where: str
    cause: str
    accepted: str = ""


def _meant(code: str, where: str, cause: str, accepted: str) -> Rule:
    """A row of what a script may well change on purpose: the way to say so stands beside the cause."""
    return Rule(code, where, f'{cause}; if that is intended, accept "{accepted}: why"', accepted)


RULES: Mapping[str, Rule] = {
    # the state that was saved
    "step": Rule(
        "M1", "the trainer's own counter", "state of another step was loaded, or the counter is not in optimizer steps"
    ),
    "optimizer step": Rule(
        "M1", "`step` of the optimizer's per-parameter state (smallest, largest)", "state of another step was loaded"
    ),
    "parameters with state": Rule("M1", "", "part of the optimizer state was dropped"),
    "weights": Rule("M1", "", "the model was not restored, or changed after the load"),
    "optimizer moments": Rule("M1", "", "the optimizer state was not restored, or belongs to other parameters"),
    "buffers": Rule("M1", "", "running statistics (batch norm) or other buffers were not restored"),
    "loss scaler": Rule("M1", "gradient scaler", "the scaler's state was not restored; it starts from its initial scale"),
    "averaged weights": Rule(
        "M1", "averaged copy of the model", "the average was not restored: it starts from other weights"
    ),
    "registered object": Rule(
        "M1", "register_for_checkpointing", "it was not restored, or was created again after the load"
    ),
    "random generators": Rule(
        "M1", "",
        "the random state was not restored: its file was skipped silently (missing, unreadable or of another world size)",
        "rng",
    ),
    "training mode": Rule(
        "M1", "model.training", "a validation before the first step left the model without dropout: call `model.train()`"
    ),
    # schedule and learning rates
    "schedulers": Rule(
        "M1", "schedulers that were prepared or registered",
        "a scheduler is not prepared or registered in this launch, or was replaced or reordered",
    ),
    "scheduler position": Rule("M1", "", "state of another step was loaded"),
    "scheduler unit": Rule("M3", "", "the number of processes changed, so the schedule would run at a different speed"),
    "learning rate per group": Rule("M1", "optimizer param_groups", "", "lr"),
    "learning rates of the next steps": Rule("M2", "scheduler and optimizer, stepped on copies", "", "lr"),
    "schedule further on": _meant(
        "M2", "", "the LR is equal now and differs later: the schedule was built with another length", "schedule"
    ),
    "scheduler_state": _meant(
        "M1", "state_dict() of the scheduler", "the scheduler's state was not restored, or changed after the load",
        "scheduler_state",
    ),
    # the optimizer, and how the ranks share the work
    "optimizers": _meant(
        "M3", "optimizer classes",
        "another optimizer class steps with this state, or prepare() was called after the load", "optimizers",
    ),
    "parameter groups": Rule(
        "M3", "parameters and elements per group", "the model or its grouping is not the one that was saved"
    ),
    "order of the parameters": Rule(
        "M5", "positions in the optimizer against positions in the model",
        "the optimizer was built over the parameters in another order: each parameter gets the moments of another one",
    ),
    "option": Rule("M1", "", "the optimizer's `{}` was set again after the load, or never restored", "{}"),
    "topology": Rule(
        "M3", "topology", "this launch runs with another {}: restore it, or accept the change with a reason", "{}"
    ),
    "frozen parameters": Rule("M3", "requires_grad", "the set of trained layers changed", "frozen_parameters"),
    # what is trained
    "model": _meant(
        "M6", "configuration of the model", "the model was built or changed with another configuration", "model"
    ),
    "module_mode": _meant(
        "M6", "mode of the modules at the first step",
        "this part of the model was left in another mode: `model.train()`, or as the script had it", "module_mode",
    ),
    "trainer": _meant("M6", "arguments of the trainer", "the trainer's arguments were changed", "trainer"),
    "average": _meant(
        "M6", "function of the averaged copy", "the average is made with another function or number", "average"
    ),
    "autocast": _meant(
        "M3", "first batches of this rank", "the script enters another `autocast` before the model", "autocast"
    ),
    "gradient": Rule("M6", "", "", "gradient"),  # `first_gradient.py`
    "dataset": _meant(
        "M6", "dataset of the loader that is trained from", "another dataset, or another part of it, is trained on", "dataset"
    ),
    "shuffle": _meant("M6", "sampler of the loader", "the loader was built with another `shuffle`", "shuffle"),
    "sequence_length": _meant(
        "M6", "tokens of the first batches", "the sequences are cut at another length", "sequence_length"
    ),
    "global_batch": _meant(
        "M3", "first batches of this rank",
        "the batch size was changed; a smaller accumulation that makes up for it must be accepted", "global_batch",
    ),
    "next batch": Rule("M4", "", "", "data"),  # `data.py`, as the next one
    "data position": Rule("M4", "", "", "data"),
    "newest checkpoint": Rule("F9", "checkpoints in the journal", "", "checkpoint"),  # noted only
}


def judge(
    expected: Expectation,
    name: str,
    saved: Any,
    found: Any,
    *,
    rule: str = "",
    key: str = "",
    where: str = "",
    cause: str = "",
    show: Callable[[Any], str] | None = None,
) -> Check:
    """One value against the saved one, by the row `rule` (default: its own name). `key`: the option's own name, for `{}`.

    `show`: a value as text, where it is not plain.
    """
    row = RULES[rule or name]
    before, after = map(show or text_of, (saved, found))
    words = {"name": name, "code": row.code, "expected": before, "found": after, "where": where or row.where}
    accepted = row.accepted.format(key)
    if is_near(saved, found):
        return Check(**words, outcome=Outcome.EQUAL)
    if accepted and (expected.accepts(accepted) or name in expected.accepted):
        return Check(**words, outcome=Outcome.NOTED, cause=f"{before} → {after}, accepted as `{accepted}`")
    return Check(**words, outcome=Outcome.DIFFERENT, cause=cause or row.cause.format(key), accepted=accepted)


def is_near(a: Any, b: Any) -> bool:
    """Whether two plain values are equal; numbers within a relative tolerance."""
    if isinstance(a, bool) or isinstance(b, bool):
        return bool(a == b)
    if isinstance(a, int | float) and isinstance(b, int | float):
        return a == b or math.isclose(a, b, rel_tol=SAME, abs_tol=0.0)
    return bool(a == b)


def text_of(value: Any) -> str:
    """A value in at most 160 characters."""
    text = "none" if value is None else str(value)
    return text if len(text) <= 160 else text[:157] + "…"


def listed(names: Sequence[str], most: int = 3) -> str:
    """The first of some names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(f"`{name}`" for name in names[:most]) + more


def show_row(row: Sequence[float | None]) -> str:
    """One LR per parameter group as text, cut after six groups."""
    shown = ", ".join("none" if lr is None else f"{lr:.9g}" for lr in row[:6])
    return f"{shown}, … ({len(row)} groups)" if len(row) > 6 else shown

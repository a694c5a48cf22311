"""What a launch begins with and keeps: tied weights, training modes, dtypes, and an LR that is the scheduler's.

Recorded right before the first step, compared at every look by identity and flags: no tensor is read.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from chronicle.resume.envelope.breach import BreachKind
from chronicle.resume.envelope.motion import lr_of

StructureBreach = tuple[BreachKind, str]


class Structure:
    """The models as they are now; `changes()` says what is no longer so."""

    def __init__(self, models: Sequence[Any]) -> None:
        self._models = tuple(models)
        self._modules = tuple((name, module) for model in models for name, module in model.named_modules())
        self._modes = [module.training for _, module in self._modules]
        self._params = [p for model in models for p in model.parameters()]
        self._ids = [id(p) for p in self._params]
        self._dtypes = [p.dtype for p in self._params]
        self._ties = tuple(_ties(models))
        self._tied = [(module._parameters, attribute) for group in self._ties for module, attribute, _ in group]
        self._quick: tuple[Any, ...] = ()  # when it was last asked
        self.has_turned()

    def has_new_parameters(self) -> bool:
        """Whether the models hold other parameters than at the beginning: a layer was replaced or added."""
        return [id(p) for model in self._models for p in model.parameters()] != self._ids

    def has_turned(self) -> bool:
        """Whether a whole model changed its mode, tied weights came apart or the dtype changed, since this was last asked.

        Cheap enough for every step.
        """
        modes, tied = [], []
        for model in self._models:
            modes.append(model.training)
        for parameters, attribute in self._tied:
            tied.append(id(parameters.get(attribute)))
        now = modes, tied, self._params[-1].dtype if self._params else None
        if now == self._quick:
            return False
        self._quick = now
        return True

    def changes(self) -> Iterator[StructureBreach]:
        """What differs from the beginning."""
        yield from self._mode_changes()
        if [p.dtype for p in self._params] != self._dtypes:
            was, now = next((d, p.dtype) for p, d in zip(self._params, self._dtypes, strict=True) if p.dtype != d)
            yield BreachKind.DTYPE, f"parameters became {_plain(now)}, they were {_plain(was)}"
        for group in self._ties:
            held = [(name, module._parameters.get(attribute)) for module, attribute, name in group]
            first = held[0][1]
            for name, other in held[1:]:
                if first is not None and other is not None and other is not first and not _same_storage(first, other):
                    yield BreachKind.UNTIED, f"`{held[0][0]}` and `{name}` were one tensor and are two"

    def _mode_changes(self) -> Iterator[StructureBreach]:
        modes = [module.training for _, module in self._modules]
        if modes == self._modes:
            return
        turned = [
            (name, module)
            for (name, module), was, now in zip(self._modules, self._modes, modes, strict=True)
            if was and not now and not _is_norm(module)
        ]
        if any(module is model for _, module in turned for model in self._models):
            yield BreachKind.MODE, "the model trains in evaluation mode: `train()` was not called again after an evaluation"
            return
        for name, module in turned:
            params = list(module.parameters())
            is_trained = not params or any(p.requires_grad for p in params)
            if is_trained and _feels_mode(module):
                yield BreachKind.MODE, f"`{name}` trains in evaluation mode; it was in training mode at the first step"
                return


def _ties(models: Sequence[Any]) -> Iterator[list[tuple[Any, str, str]]]:
    places: dict[int, list[tuple[Any, str, str]]] = {}
    for model in models:
        for prefix, module in model.named_modules():
            for attribute, param in module._parameters.items():
                if param is not None:
                    name = f"{prefix}.{attribute}" if prefix else attribute
                    places.setdefault(id(param), []).append((module, attribute, name))
    return (group for group in places.values() if len(group) > 1)


def _same_storage(first: Any, other: Any) -> bool:
    return bool(first.numel() == 0 or other.numel() == 0 or first.data_ptr() == other.data_ptr())


def _is_norm(module: Any) -> bool:
    return "Norm" in type(module).__name__


def _feels_mode(module: Any) -> bool:
    """Whether evaluation mode changes what the module computes."""
    return any(
        (getattr(part, "p", 0) or 0) > 0 if "Dropout" in type(part).__name__ else "BatchNorm" in type(part).__name__
        for part in module.modules()
    )


def _plain(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def broken_promises(models: Sequence[Any]) -> Iterator[StructureBreach]:
    """What the models say of themselves and is not so at the first step: tied embeddings."""
    for wrapped in models:
        model = getattr(wrapped, "module", wrapped)
        if not hasattr(model, "peft_config"):
            yield from _untied_embeddings(model)


def _untied_embeddings(model: Any) -> Iterator[StructureBreach]:
    config, inputs = getattr(model, "config", None), getattr(model, "get_input_embeddings", None)
    outputs = getattr(model, "get_output_embeddings", None)
    if getattr(config, "tie_word_embeddings", False) is not True or inputs is None or outputs is None:
        return
    first, last = getattr(inputs(), "weight", None), getattr(outputs(), "weight", None)
    if first is None or last is None or first is last or first.shape != last.shape or _same_storage(first, last):
        return
    yield BreachKind.UNTIED, "the configuration says `tie_word_embeddings`, but input and output embeddings are two tensors"


# ---- the LR in use ---------------------------------------------------------------------------------------------------

MATCHED, DIFFERENT = 3, 2  # looks


@dataclass(slots=True)
class _Plan:
    """What is known of the LR of one optimizer."""

    matched: int = 0  # looks at which it was its scheduler's
    different: int = 0  # looks since then at which it was not
    since: int | None = None  # the step of the first of these
    scheduler: Any = None  # its only one, whose LR it has used so far
    by_hand: bool = False  # a script that sets LRs by hand as well is not accused


class PlannedLr:
    """The LR of every group against what its only scheduler set last, over the whole launch."""

    def __init__(self) -> None:
        self._plans: dict[int, _Plan] = defaultdict(_Plan)

    def strays(self, optimizer: Any) -> bool:
        """Whether the LR of an optimizer that used its scheduler's is another one now. Cheap enough for every step."""
        plan = self._plans[id(optimizer)]
        planned = getattr(plan.scheduler, "_last_lr", None)
        if planned is None:
            return False
        return bool(plan.different) or [group.get("lr") for group in optimizer.param_groups] != planned

    def look(self, optimizer: Any, schedulers: Sequence[Any], step: int | None) -> tuple[int | None, str] | None:
        """Since which step this optimizer's LR is not its scheduler's, and how it differs."""
        own = [s for s in schedulers if getattr(s, "optimizer", None) is optimizer]
        planned = list(getattr(own[0], "_last_lr", None) or ()) if len(own) == 1 else []
        used = [lr_of(group) for group in optimizer.param_groups]
        if len(planned) != len(used) or None in used or not all(isinstance(lr, int | float) for lr in planned):
            return None
        plan = self._plans[id(optimizer)]
        pairs = zip(used, planned, strict=True)
        wrong = [(a, b) for a, b in pairs if not math.isclose(a or 0.0, b, rel_tol=1e-6, abs_tol=1e-18)]
        if not wrong:
            plan.matched, plan.different = plan.matched + 1, 0
            if plan.matched >= MATCHED and not plan.by_hand and used == planned:  # numbers, and no tensor
                plan.scheduler = own[0]
            return None
        plan.by_hand = plan.by_hand or plan.matched < MATCHED
        if plan.by_hand:
            return None
        plan.since = step if plan.different == 0 else plan.since
        plan.different += 1
        if plan.different < DIFFERENT:
            return None
        plan.scheduler = None
        return plan.since, f"LR {wrong[0][0]:.6g} is used, its scheduler set {wrong[0][1]:.6g}"

"""What a launch begins with and keeps: tied weights, training modes, dtypes, frozen layers, and an LR that is the scheduler's.

Recorded right before the first step, compared at every look by identity and flags: no tensor is read.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from chronicle.resume.envelope.breach import BreachKind
from chronicle.resume.envelope.motion import lr_of

__all__ = ["LrPlan", "Structure", "broken_promises", "tied_names"]

Found = tuple[BreachKind, str]
# attributes with which modules say that layers are frozen; not when, nor of batch statistics alone
FROZEN_NAME = re.compile(r"(is_)?frozen(_(stages|layers|backbone|encoder))?|freeze(_(backbone|encoder|stages|layers|at))?")


class Structure:
    """The models as they are now; `changes()` says what is no longer so."""

    def __init__(self, models: Sequence[Any]) -> None:
        self._models = tuple(models)
        self._modules = tuple((name, module) for model in models for name, module in model.named_modules())
        self._modes = [module.training for _, module in self._modules]
        self._params = [p for model in models for p in model.parameters()]
        self._dtypes = [p.dtype for p in self._params]
        self._ties = tuple(_ties(models))

    @property
    def tied(self) -> tuple[tuple[str, ...], ...]:
        """Names of the parameters that are one tensor."""
        return tuple(tuple(name for _, _, name in group) for group in self._ties)

    def changes(self) -> Iterator[Found]:
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

    def _mode_changes(self) -> Iterator[Found]:
        modes = [module.training for _, module in self._modules]
        if modes == self._modes:
            return
        turned = [
            (name, module)
            for (name, module), was, now in zip(self._modules, self._modes, modes, strict=True)
            if was and not now and not _is_norm(module)
        ]
        for model in self._models:
            if any(module is model for _, module in turned):
                yield BreachKind.MODE, "the model trains in evaluation mode: `train()` was not called again after an evaluation"
                return
        for name, module in turned:
            params = list(module.parameters())
            if (not params or any(p.requires_grad for p in params)) and _feels_mode(module):
                yield BreachKind.MODE, f"`{name}` trains in evaluation mode; it was in training mode at the first step"
                return


def tied_names(models: Sequence[Any]) -> tuple[tuple[str, ...], ...]:
    """Names of the parameters that are one tensor, group by group."""
    return tuple(tuple(name for _, _, name in group) for group in _ties(models))


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


def broken_promises(models: Sequence[Any]) -> Iterator[Found]:
    """What the models say of themselves and is not so at the first step: tied embeddings, frozen layers."""
    for wrapped in models:
        model = getattr(wrapped, "module", wrapped)
        if not hasattr(model, "peft_config"):
            yield from _untied_embeddings(model)
        yield from _unfrozen(model)


def _untied_embeddings(model: Any) -> Iterator[Found]:
    config, inputs = getattr(model, "config", None), getattr(model, "get_input_embeddings", None)
    outputs = getattr(model, "get_output_embeddings", None)
    if getattr(config, "tie_word_embeddings", False) is not True or inputs is None or outputs is None:
        return
    first, last = getattr(inputs(), "weight", None), getattr(outputs(), "weight", None)
    if first is None or last is None or first is last or first.shape != last.shape or _same_storage(first, last):
        return
    yield BreachKind.UNTIED, "the configuration says `tie_word_embeddings`, but input and output embeddings are two tensors"


def _unfrozen(model: Any) -> Iterator[Found]:
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if not FROZEN_NAME.fullmatch(attribute) or not (value is True or (isinstance(value, int) and value > 0)):
                continue
            params = list(module.parameters())
            if params and all(p.requires_grad for p in params) and all(part.training for part in module.modules()):
                where = f"`{name}`" if name else "the model"
                yield BreachKind.FROZEN, f"{where} says `{attribute}={value}`, but all of its parameters are trained"
                return


# ---- the LR in use ---------------------------------------------------------------------------------------------------

MATCHED, DIFFERENT = 3, 2  # looks


class LrPlan:
    """The LR of every group against what its only scheduler set last, over the whole launch.

    A script that sets LRs by hand as well never matches and is not accused.
    """

    def __init__(self) -> None:
        self._matched: dict[int, int] = {}
        self._different: dict[int, tuple[int, int | None]] = {}

    def look(self, optimizer: Any, schedulers: Sequence[Any], step: int | None) -> tuple[int | None, str] | None:
        """Since which step this optimizer's LR is not its scheduler's, and how it differs."""
        own = [s for s in schedulers if getattr(s, "optimizer", None) is optimizer]
        planned = getattr(own[0], "_last_lr", None) if len(own) == 1 else None
        used = [lr_of(group) for group in optimizer.param_groups]
        if not isinstance(planned, (list, tuple)) or len(planned) != len(used) or None in used:
            return None
        pairs = [(used_lr, float(lr)) for used_lr, lr in zip(used, planned, strict=True) if _is_number(lr)]
        if len(pairs) != len(used):
            return None
        key = id(optimizer)
        wrong = next((pair for pair in pairs if abs((pair[0] or 0.0) - pair[1]) > 1e-6 * max(abs(pair[1]), 1e-12)), None)
        if wrong is None:
            self._matched[key], _ = self._matched.get(key, 0) + 1, self._different.pop(key, None)
            return None
        if self._matched.get(key, 0) < MATCHED:
            self._matched[key] = -(10**9)  # never the scheduler's alone
            return None
        count, since = self._different.get(key, (0, step))
        self._different[key] = (count + 1, since)
        if count + 1 < DIFFERENT:
            return None
        return since, f"LR {wrong[0]:.6g} is used, its scheduler set {wrong[1]:.6g}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


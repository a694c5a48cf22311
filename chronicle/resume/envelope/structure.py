"""What a launch begins with and keeps: tied weights, training modes, dtypes.

Recorded right before the first step, compared at every look by identity and flags: no tensor is read.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from chronicle.resume.envelope.breach import BreachKind

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



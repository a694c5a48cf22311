"""What an optimizer holds, as values: steps, groups with their options and norms, which parameter sits where."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from chronicle.resume.learning_rate import raw_optimizer
from chronicle.resume.memory import Group
from chronicle.resume.tensors import digest, local_part, norm

__all__ = ["collect_optimizers", "describe_group", "groups_of", "moments_of", "optimizer_steps", "order_of", "steppers_of"]

MOMENT_KEYS = ("exp_avg", "momentum_buffer", "moment1")  # Adam family, SGD, some third-party names
COMPARED_APART = {"params", "lr", "initial_lr", "max_lr", "min_lr", "weight_decay", "step"}
HOW_IT_IS_COMPUTED = {"foreach", "fused", "capturable", "differentiable"}  # no part of the state


def optimizer_steps(optimizers: Iterable[Any]) -> tuple[int, int] | None:
    """Smallest and largest `step` any parameter's state holds; None where the optimizer counts none (SGD, or no step yet)."""
    low: int | None = None
    high: int | None = None
    for optimizer in optimizers:
        for value in _step_values(optimizer):
            low, high = (value if low is None else min(low, value)), (value if high is None else max(high, value))
    return None if low is None or high is None else (low, high)


def _step_values(optimizer: Any) -> Iterator[int]:
    import torch

    tensors = []
    for state in optimizer.state.values():
        value = state.get("step") if isinstance(state, Mapping) else None
        if torch.is_tensor(value):
            tensors.append(value.detach().reshape(-1)[:1].float())
        elif isinstance(value, (int, float)):
            yield int(value)
    for device in {tensor.device for tensor in tensors}:  # one transfer a device, not one a parameter
        stacked = torch.cat([tensor for tensor in tensors if tensor.device == device])
        yield int(stacked.min())
        yield int(stacked.max())
    for group in optimizer.param_groups:
        if isinstance(group.get("step"), int):  # apex and DeepSpeed's FusedAdam count per group
            yield group["step"]


def groups_of(optimizers: Iterable[Any]) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    return ((optimizer, group) for optimizer in optimizers for group in optimizer.param_groups)


def describe_group(optimizer: Any, group: Mapping[str, Any]) -> Group:
    params = group["params"]
    moments = list(_group_moments(optimizer, group))
    return Group(
        lr=float(group["lr"]),
        initial_lr=_number(group.get("initial_lr")),
        max_lr=_number(group.get("max_lr")),
        min_lr=_number(group.get("min_lr")),
        weight_decay=_number(group.get("weight_decay")),
        num_params=len(params),
        num_elements=sum(int(p.numel()) for p in params),
        moment_norm=norm(moments),
        num_states=sum(1 for p in params if optimizer.state.get(p)),
        settings=_settings(group),
    )


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """The plain options of a group that are compared as they are: betas, momentum, eps, flags."""
    settings: dict[str, Any] = {}
    for name, value in group.items():
        if name in COMPARED_APART or name in HOW_IT_IS_COMPUTED:
            continue
        if value is None or isinstance(value, (bool, int, float, str)):
            settings[name] = value
        elif isinstance(value, (tuple, list)) and all(isinstance(item, (bool, int, float, str)) for item in value):
            settings[name] = list(value)
    return settings


def order_of(optimizers: Sequence[Any], models: Sequence[Any]) -> str:
    """Digest of which parameter of the models each place of the optimizers holds; "" where none can be told."""
    places = {id(p): place for place, p in enumerate(p for model in models for p in model.parameters())}
    held = [[places.get(id(p), -1) for p in group["params"]] for _, group in groups_of(optimizers)]
    return digest(repr(held).encode()) if any(place >= 0 for group in held for place in group) else ""


def _group_moments(optimizer: Any, group: Mapping[str, Any]) -> Iterator[Any]:
    for param in group["params"]:
        state = optimizer.state.get(param)
        if not isinstance(state, Mapping):
            continue
        for key in MOMENT_KEYS:
            if hasattr(state.get(key), "numel"):
                yield state[key]
                break


def moments_of(optimizers: Iterable[Any]) -> Iterator[Any]:
    """Every tensor of the optimizers' states in parameter order, but the step counts."""
    for optimizer, group in groups_of(optimizers):
        for param in group["params"]:
            state = optimizer.state.get(param)
            for key in sorted(state, key=str) if isinstance(state, Mapping) else ():
                if key != "step" and hasattr(state[key], "numel"):
                    yield local_part(state[key])


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def collect_optimizers(optimizers: Iterable[Any]) -> tuple[Any, ...]:
    """Torch's own optimizers behind the wrappers, each once, in order."""
    seen: dict[int, Any] = {}
    for optimizer in optimizers:
        raw = raw_optimizer(optimizer)
        seen.setdefault(id(raw), raw)
    return tuple(seen.values())


def steppers_of(optimizers: Iterable[Any]) -> tuple[Any, ...]:
    """Those whose `step` is one optimizer step; none under a DeepSpeed optimizer, which steps the one inside by groups."""
    found = tuple(optimizers)
    for thing in found:
        for _ in range(5):
            if type(thing).__module__.startswith("deepspeed.runtime"):
                return ()
            thing = getattr(thing, "optimizer", None)
    return collect_optimizers(found)

"""From live objects to a `Memory`: one pass over first moments, a strided sample of every tensor, digests of the generators.

A sum does not see a permutation, and a full hash costs as much as a save; so every tensor gives `SAMPLES` elements at a
fixed stride, hashed bit for bit, and the first moments also give their norm per group. Nothing is written to any object,
no random number is drawn. torch is imported inside the functions; the objects passed in brought it along.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from chronicle.resume.forecast import BoundScheduler, forecast_lrs, raw_optimizer
from chronicle.resume.memory import Group, Memory, RankDigest, Scheduler

__all__ = ["LiveState", "fingerprint_memory", "rank_digest", "rng_digests"]

SAMPLES = 64  # elements per tensor
MOMENT_KEYS = ("exp_avg", "momentum_buffer", "moment1")  # Adam family, SGD, some third-party names


@dataclass(slots=True, kw_only=True)
class LiveState:
    """The objects a launch trains with, as an adapter found them. Optimizers are torch's own, wrappers taken off."""

    models: Sequence[Any] = ()
    optimizers: Sequence[Any] = ()
    schedulers: Sequence[BoundScheduler] = ()
    scaler: Any = None
    averages: Mapping[str, Any] = field(default_factory=dict)  # name -> averaged copy of the model (EMA)
    topology: Mapping[str, Any] = field(default_factory=dict)
    step: int | None = None  # when the framework or the trainer counts optimizer steps itself
    data: Any = None
    rank: int = 0


def fingerprint_memory(
    live: LiveState,
    *,
    lr_source: str = "untested",
    recent_lrs: Sequence[tuple[float, ...]] = (),
) -> Memory:
    """Describe memory as it is now; `ranks` holds this rank's digest only."""
    import torch

    with torch.no_grad():
        steps = optimizer_steps(live.optimizers)
        return Memory(
            step=live.step if live.step is not None else (steps[1] if steps else None),
            groups=tuple(_group(optimizer, group) for optimizer, group in _groups(live.optimizers)),
            optimizer_steps=steps,
            optimizers=tuple(type(optimizer).__name__ for optimizer in live.optimizers),
            schedulers=tuple(_scheduler(bound) for bound in live.schedulers),
            next_lrs=forecast_lrs(live.optimizers, live.schedulers),
            lr_source=lr_source,
            recent_lrs=tuple(recent_lrs),
            topology=dict(live.topology),
            scaler=_scaler(live.scaler),
            averages={name: _tensor_digest(_weights((model,))) for name, model in live.averages.items()},
            data=live.data,
            ranks=(rank_digest(live),),
        )


def rank_digest(live: LiveState) -> RankDigest:
    """This rank's digests: what differs between ranks, and what must not."""
    return RankDigest(
        rank=live.rank,
        rng=rng_digests(),
        weights=_tensor_digest(_weights(live.models)),
        moments=_tensor_digest(_moments(live.optimizers)),
        data="" if live.data is None else _digest(json.dumps(live.data, sort_keys=True, default=str).encode()),
    )


def rng_digests() -> dict[str, str]:
    """Digests of Python's, NumPy's, torch's and (once used) CUDA's generator states; reading draws nothing."""
    import random
    import sys

    import torch

    digests = {
        "python": _digest(repr(random.getstate()).encode()),
        "torch": _digest(torch.get_rng_state().numpy().tobytes()),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, position, has_gauss, cached = numpy.random.get_state()
        digests["numpy"] = _digest(keys.tobytes() + repr((name, position, has_gauss, cached)).encode())
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states = b"".join(state.numpy().tobytes() for state in torch.cuda.get_rng_state_all())
        digests[f"cuda:{torch.cuda.device_count()}"] = _digest(states)
    return digests


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


def _groups(optimizers: Iterable[Any]) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    return ((optimizer, group) for optimizer in optimizers for group in optimizer.param_groups)


def _group(optimizer: Any, group: Mapping[str, Any]) -> Group:
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
        moment_norm=_norm(moments),
        num_states=sum(1 for p in params if optimizer.state.get(p)),
    )


def _group_moments(optimizer: Any, group: Mapping[str, Any]) -> Iterator[Any]:
    for param in group["params"]:
        state = optimizer.state.get(param)
        if not isinstance(state, Mapping):
            continue
        for key in MOMENT_KEYS:
            if hasattr(state.get(key), "numel"):
                yield state[key]
                break


def _moments(optimizers: Iterable[Any]) -> Iterator[Any]:
    """First and second moments in parameter order."""
    for optimizer, group in _groups(optimizers):
        for param in group["params"]:
            state = optimizer.state.get(param)
            for key in (*MOMENT_KEYS, "exp_avg_sq"):
                if isinstance(state, Mapping) and hasattr(state.get(key), "numel"):
                    yield _local(state[key])


def _weights(models: Iterable[Any]) -> Iterator[Any]:
    """Parameters and saved buffers, in registration order."""
    for model in models:
        yield from (_local(p) for p in model.parameters())
        transient = {
            f"{prefix}.{name}" if prefix else name
            for prefix, module in model.named_modules()
            for name in getattr(module, "_non_persistent_buffers_set", ())
        }
        yield from (_local(b) for name, b in model.named_buffers() if name not in transient)


def _local(tensor: Any) -> Any:
    """This rank's part of a distributed tensor (DTensor, ZeRO-3 parameter); other tensors as they are."""
    if hasattr(tensor, "ds_tensor"):
        return tensor.ds_tensor
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _norm(tensors: Sequence[Any]) -> float | None:
    import torch

    if not tensors:
        return None
    total = 0.0
    own = [_local(tensor) for tensor in tensors]
    for device in {tensor.device for tensor in own}:
        parts = torch._foreach_norm([t.detach() for t in own if t.device == device and t.numel()])
        total += float(sum(part.double() ** 2 for part in parts)) if parts else 0.0
    if any(placement.is_shard() for tensor in tensors for placement in getattr(tensor, "placements", ())):
        # every rank holds another part (FSDP2): the norm that is compared is that of the whole
        whole = torch.tensor([total], dtype=torch.float64, device=own[0].device)
        torch.distributed.all_reduce(whole)
        total = float(whole.item())
    return float(total**0.5)


def _tensor_digest(tensors: Iterable[Any]) -> str:
    """Hash of a strided sample of every tensor, bit for bit, with shapes and dtypes; "" for no tensors."""
    import torch

    shapes: list[str] = []
    samples: dict[tuple[Any, Any], list[Any]] = {}
    for tensor in tensors:
        shapes.append(f"{tuple(tensor.shape)}{tensor.dtype}")
        size = tensor.numel()
        if size:
            flat = tensor.detach().reshape(-1)[:: max(1, size // SAMPLES)][:SAMPLES]
            samples.setdefault((tensor.device, tensor.dtype), []).append(flat)
    if not shapes:
        return ""
    digest = hashlib.sha256("|".join(shapes).encode())
    for parts in samples.values():
        digest.update(torch.cat(parts).contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def _scheduler(bound: BoundScheduler) -> Scheduler:
    scheduler = bound.scheduler
    last_epoch = getattr(scheduler, "last_epoch", getattr(scheduler, "last_batch_iteration", None))
    last_lr = getattr(scheduler, "_last_lr", None) or ()
    return Scheduler(
        name=type(scheduler).__name__,
        last_epoch=int(last_epoch) if isinstance(last_epoch, (int, float)) else None,
        step_count=getattr(scheduler, "_step_count", None),
        last_lr=tuple(float(lr) for lr in last_lr),
        unit=bound.unit,
    )


def _scaler(scaler: Any) -> Mapping[str, Any] | None:
    """Scale and counters of a GradScaler or DeepSpeed loss scaler, as plain numbers."""
    if scaler is None:
        return None
    if hasattr(scaler, "state_dict"):
        return {str(k): v for k, v in scaler.state_dict().items() if isinstance(v, (int, float))}
    names = ("cur_scale", "cur_iter", "last_overflow_iter", "loss_scale")
    return {
        name: float(getattr(scaler, name)) for name in names if isinstance(getattr(scaler, name, None), (int, float))
    }


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def collect_optimizers(optimizers: Iterable[Any]) -> tuple[Any, ...]:
    """Torch's own optimizers behind the wrappers, each once, in order."""
    seen: dict[int, Any] = {}
    for optimizer in optimizers:
        raw = raw_optimizer(optimizer)
        seen.setdefault(id(raw), raw)
    return tuple(seen.values())

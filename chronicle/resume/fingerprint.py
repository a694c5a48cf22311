"""From live objects to a `Memory`: one pass over first moments, a strided sample of every tensor, digests of the generators.

A sum does not see a permutation, and a full hash costs as much as a save; so every tensor gives `SAMPLES` elements at a
fixed stride, hashed bit for bit, and the first moments also give their norm per group. Nothing is written to any object,
no random number is drawn. torch is imported inside the functions; the objects passed in brought it along.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from chronicle.resume.learning_rate import BoundScheduler, forecast_further, forecast_lrs
from chronicle.resume.memory import Memory, RankDigest, Scheduler
from chronicle.resume.optimizers import describe_group, groups_of, moments_of, optimizer_steps, order_of
from chronicle.resume.tensors import digest, local_part, plain_bytes, tensor_digest

__all__ = [
    "LiveState",
    "buffers_digest",
    "fingerprint_memory",
    "frozen_parameters",
    "object_digests",
    "rank_digest",
    "rng_digests",
]


@dataclass(slots=True, kw_only=True)
class LiveState:
    """The objects a launch trains with, as an adapter found them. Optimizers are torch's own, wrappers taken off."""

    models: Sequence[Any] = ()
    optimizers: Sequence[Any] = ()
    schedulers: Sequence[BoundScheduler] = ()
    scaler: Any = None
    averages: Mapping[str, Any] = field(default_factory=dict)  # name -> averaged copy of the model (EMA)
    objects: Mapping[str, Any] = field(default_factory=dict)  # name -> object of the script's own with a `state_dict`
    topology: Mapping[str, Any] = field(default_factory=dict)
    step: int | None = None  # when the framework or the trainer counts optimizer steps itself
    data: Any = None
    rank: int = 0
    steppers: Sequence[Any] | None = None  # what is stepped once an optimizer step; None: the optimizers themselves
    loaders: Sequence[Any] = ()  # data loaders whose order the guard may change
    reading: Any = None  # the loader that is being iterated

    @property
    def stepping(self) -> Sequence[Any]:
        """The objects whose `step` is one optimizer step."""
        return self.optimizers if self.steppers is None else self.steppers


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
            groups=tuple(describe_group(optimizer, group) for optimizer, group in groups_of(live.optimizers)),
            optimizer_steps=steps,
            optimizers=tuple(type(optimizer).__name__ for optimizer in live.optimizers),
            schedulers=tuple(_scheduler(bound) for bound in live.schedulers),
            next_lrs=forecast_lrs(live.optimizers, live.schedulers),
            lr_source=lr_source,
            recent_lrs=tuple(recent_lrs),
            topology=dict(live.topology),
            scaler=_scaler(live.scaler),
            averages={name: tensor_digest((*_weights((m,)), *_buffers((m,)))) for name, m in live.averages.items()},
            objects=object_digests(live),
            order=order_of(live.optimizers, live.models),
            frozen=frozen_parameters(live),
            training=tuple(bool(model.training) for model in live.models) or None,
            data=live.data,
            ranks=(rank_digest(live),),
        )


def rank_digest(live: LiveState) -> RankDigest:
    """This rank's digests: what differs between ranks, and what must not."""
    return RankDigest(
        rank=live.rank,
        rng=rng_digests(),
        weights=tensor_digest(_weights(live.models)),
        moments=tensor_digest(moments_of(live.optimizers)),
        buffers=buffers_digest(live),
        data="" if live.data is None else digest(json.dumps(live.data, sort_keys=True, default=str).encode()),
    )


def buffers_digest(live: LiveState) -> str:
    """Digest of the running statistics and other saved buffers of the models; "" where they have none."""
    return tensor_digest(_buffers(live.models))


def frozen_parameters(live: LiveState) -> str:
    """How many parameters take no gradient, and a digest of which."""
    flags = [bool(p.requires_grad) for model in live.models for p in model.parameters()]
    return f"{flags.count(False)} of {len(flags)} ({digest(repr(flags).encode())[:8]})" if flags else ""


def object_digests(live: LiveState) -> dict[str, str]:
    """Digest of the state of each of the script's own objects; one that cannot tell its state is left out."""
    digests = {}
    for name, thing in live.objects.items():
        try:
            digests[name] = digest(plain_bytes(thing.state_dict()))
        except Exception:  # noqa: BLE001 foreign code; Accelerate itself says it if the object cannot be saved
            continue
    return digests


def rng_digests() -> dict[str, str]:
    """Digests of Python's, NumPy's, torch's and (once used) CUDA's generator states; reading draws nothing."""
    import random
    import sys

    import torch

    digests = {
        "python": digest(repr(random.getstate()).encode()),
        "torch": digest(torch.get_rng_state().numpy().tobytes()),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, position, has_gauss, cached = numpy.random.get_state()
        digests["numpy"] = digest(keys.tobytes() + repr((name, position, has_gauss, cached)).encode())
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states = b"".join(state.numpy().tobytes() for state in torch.cuda.get_rng_state_all())
        digests[f"cuda:{torch.cuda.device_count()}"] = digest(states)
    return digests


def _weights(models: Iterable[Any]) -> Iterator[Any]:
    """Parameters, in registration order."""
    return (local_part(p) for model in models for p in model.parameters())


def _buffers(models: Iterable[Any]) -> Iterator[Any]:
    """Saved buffers, in registration order."""
    for model in models:
        transient = {
            f"{prefix}.{name}" if prefix else name
            for prefix, module in model.named_modules()
            for name in getattr(module, "_non_persistent_buffers_set", ())
        }
        yield from (local_part(b) for name, b in model.named_buffers() if name not in transient)


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
        further=forecast_further(bound),
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

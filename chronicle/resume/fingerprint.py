"""Makes a `Memory` from the objects in memory: samples of every tensor, generator digests.

No object is changed and no random number is drawn. torch is imported inside the functions.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from chronicle.resume.faults import raised_by_script, reason_of
from chronicle.resume.horizon import bound_numbers
from chronicle.resume.learning_rate import BoundScheduler, forecast_further, forecast_lrs, number, raw_optimizer
from chronicle.resume.memory import LrRow, Memory, ParamGroup, RankDigest, Scheduler, plain_numbers
from chronicle.resume.samples import apart, digest, digest_and_each, own_shard, plain_bytes, sample_of, tensor_digest

MOST_EACH = 1 << 14  # characters: of 4096 weights
COMPARED_APART = {"params", "lr", "initial_lr", "max_lr", "min_lr", "weight_decay", "step"}
IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable"}  # how a step is computed: no part of the state


@dataclass(slots=True, kw_only=True)
class LiveState:
    """The objects a launch trains with, as an adapter found them. Optimizers are torch's own, without wrappers."""

    models: Sequence[Any] = ()
    optimizers: Sequence[Any] = ()
    schedulers: Sequence[BoundScheduler] = ()
    scaler: Any = None
    averages: Mapping[str, Any] = field(default_factory=dict)  # name -> averaged copy of the model (EMA)
    objects: Mapping[str, Any] = field(default_factory=dict)  # name -> the script's own objects with a `state_dict`
    topology: Mapping[str, Any] = field(default_factory=dict)
    step: int | None = None  # when the framework or the trainer counts optimizer steps itself
    data: Any = None
    rank: int = 0
    steppers: Sequence[Any] | None = None  # what is stepped once an optimizer step; None: the optimizers themselves
    loaders: Sequence[Any] = ()  # data loaders whose order the guard may change
    reading: Any = None  # the loader that is being iterated
    feed: Any = None  # the loader that is trained from, where the guard may not change its order
    accumulating: bool = False  # gradients are being accumulated for a step that has not come yet
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of the trainer: how it makes loss and gradient
    unknown: Mapping[str, str] = field(default_factory=dict)  # what the script could not say -> why

    @property
    def stepping(self) -> Sequence[Any]:
        """The objects whose `step` is one optimizer step."""
        return self.optimizers if self.steppers is None else self.steppers


def fingerprint_memory(
    live: LiveState,
    *,
    lr_source: str = "untested",
    recent_lrs: Sequence[LrRow] = (),
    digests: bool = True,
) -> Memory:
    """Describe memory as it is now; `ranks` holds this rank's digest only.

    `digests` False: without what must be read from the tensors of moments, averages and the script's own objects; of this
    rank's digest only the weights.
    """
    import torch

    parts = Parts()
    take = parts.take
    with torch.no_grad():
        steps = take("optimizer_steps", lambda: optimizer_steps(live.optimizers))
        # of the first optimizer: a critic may take several for each of its steps
        counted = steps if len(live.optimizers) < 2 else take("step", lambda: optimizer_steps(live.optimizers[:1]))
        own = rank_digest(live, parts, whole=digests)
        return Memory(
            step=live.step if live.step is not None or not counted else counted[1],
            groups=take("groups", lambda: tuple(_groups(live.optimizers, parts)), ()),
            optimizer_steps=steps,
            optimizers=tuple(type(optimizer).__name__ for optimizer in live.optimizers),
            schedulers=take("schedulers", lambda: tuple(map(_scheduler, live.schedulers)), ()),
            next_lrs=take("next_lrs", lambda: forecast_lrs(live.optimizers, live.schedulers)),
            lr_source=lr_source,
            recent_lrs=tuple(recent_lrs),
            topology=dict(live.topology),
            scaler=take("scaler", lambda: _scaler(live.scaler)),
            averages=parts.each("averaged weights", live.averages if digests else {}, _average_digest),
            objects=parts.each("state of", live.objects if digests else {}, _object_digest),
            order=take("order", lambda: parameter_order(live.optimizers, live.models), ""),
            frozen=take("frozen", lambda: frozen_parameters(live), ""),
            data=live.data,
            ranks=(own,),
            unknown={**live.unknown, **parts.unknown},
        )


class Parts:
    """Takes the parts of a description one by one: a part that cannot be described is left out, with the reason."""

    def __init__(self) -> None:
        self.unknown: dict[str, str] = {}

    def take(self, name: str, work: Callable[[], Any], otherwise: Any = None) -> Any:
        """What `work` returns, or `otherwise` if it raises: foreign objects may be of any kind."""
        try:
            return work()
        except Exception as problem:
            if raised_by_script(problem):
                raise
            self.unknown[name] = reason_of(problem)
            return otherwise

    def each(self, name: str, things: Mapping[str, Any], work: Callable[[Any], str]) -> dict[str, str]:
        """`work` of each thing, by its own name."""
        found = {key: self.take(f"{name} `{key}`", partial(work, thing), "") for key, thing in things.items()}
        return {key: value for key, value in found.items() if value}


def rank_digest(live: LiveState, parts: Parts, *, whole: bool = True) -> RankDigest:
    """Digests of what this rank holds: generators, weights and moments. Not `whole`: weights alone."""
    weights, each = parts.take("weights", lambda: weights_and_each(live), ("", ""))
    if not whole:
        return RankDigest(rank=live.rank, weights=weights)
    moments, each_moment = parts.take("moments", lambda: _moments_and_each(live.optimizers), ("", ""))
    return RankDigest(
        rank=live.rank,
        rng=parts.take("rng", rng_digests, {}),
        weights=weights,
        each=each if live.rank == 0 and len(each) <= MOST_EACH else "",
        moments=moments,
        each_moment=each_moment if live.rank == 0 and len(each_moment) <= MOST_EACH else "",
    )


def weights_and_each(live: LiveState) -> tuple[str, str]:
    """Digest of all weights of the models, and 16 bits of each."""
    return digest_and_each(_weights(live.models))


def rounded_weights(live: LiveState) -> str:
    """The half precision in which every weight can be written exactly, though it is held in float32; "" if there is none.

    Weights that were trained never are so: they came out of a file of half precision.
    """
    import torch

    held = [own_shard(p).detach() for model in live.models for p in model.parameters()]
    held = [tensor for tensor in held if tensor.numel() and not tensor.is_meta]
    if not held or any(tensor.dtype is not torch.float32 for tensor in held):
        return ""
    sample = torch.cat([sample_of(tensor).cpu() for tensor in held])
    for kind in (torch.bfloat16, torch.float16):
        if bool(torch.equal(sample.to(kind).to(torch.float32), sample)) and bool((sample != sample.round()).any()):
            return str(kind).removeprefix("torch.")
    return ""


def frozen_parameters(live: LiveState) -> str:
    """How many parameters take no gradient, and a digest of which."""
    flags = [bool(p.requires_grad) for model in live.models for p in model.parameters()]
    return f"{flags.count(False)} of {len(flags)} ({digest(repr(flags).encode())[:8]})" if flags else ""


def object_digests(live: LiveState) -> dict[str, str]:
    """Digest of the state of each of the script's own objects; one whose `state_dict` raises is left out."""
    return Parts().each("state of", live.objects, _object_digest)


def _object_digest(thing: Any) -> str:
    return digest(plain_bytes(thing.state_dict()))


def _average_digest(model: Any) -> str:
    """Of an averaged copy; a library's own kind of average (Diffusers, torch_ema) is known by its `state_dict`."""
    if hasattr(model, "named_modules"):
        return tensor_digest((*_weights((model,)), *_buffers((model,))))
    return _object_digest(model)


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
    return (own_shard(p) for model in models for p in model.parameters())


def _buffers(models: Iterable[Any]) -> Iterator[Any]:
    """This rank's part of the saved buffers of all models."""
    return (own_shard(buffer) for model in models for _, buffer in saved_buffers(model))


def saved_buffers(model: Any) -> Iterator[tuple[str, Any]]:
    """Buffers of a model that its `state_dict` holds, with their names, in registration order."""
    transient = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in getattr(module, "_non_persistent_buffers_set", ())
    }
    return ((name, buffer) for name, buffer in model.named_buffers() if name not in transient)


def _scheduler(bound: BoundScheduler) -> Scheduler:
    scheduler = bound.scheduler
    last_epoch = getattr(scheduler, "last_epoch", getattr(scheduler, "last_batch_iteration", None))
    return Scheduler(
        name=type(scheduler).__name__,
        last_epoch=int(last_epoch) if isinstance(last_epoch, (int, float)) else None,
        unit=bound.unit,
        further=forecast_further(bound),
        bound=bound_numbers(bound),
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


# ---- optimizers ------------------------------------------------------------------------------------------------------

def optimizer_steps(optimizers: Iterable[Any]) -> tuple[int, int] | None:
    """Smallest and largest `step` any parameter's state holds; None without counts (SGD, or no step yet)."""
    found = [value for optimizer in optimizers for value in _step_values(optimizer)]
    return (min(found), max(found)) if found else None


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
    """Every parameter group with its optimizer, in order; an engine has none."""
    return ((optimizer, group) for optimizer in optimizers for group in getattr(optimizer, "param_groups", ()))


def params_of(*optimizers: Any) -> list[Any]:
    """Every parameter that they hold, in order."""
    return [p for _, group in groups_of(optimizers) for p in group["params"]]


def names_of(models: Iterable[Any]) -> dict[int, str]:
    """The names of all parameters, by `id`."""
    return {id(p): name for model in models for name, p in model.named_parameters()}


def _groups(optimizers: Sequence[Any], parts: Parts) -> Iterator[ParamGroup]:
    """LR, sizes and options of the parameter groups. An LR of None is an optimizer that computes its own."""
    for optimizer, group in groups_of(optimizers):
        params, lr = group["params"], number(group.get("lr"))
        if lr is None and group.get("lr") is not None:
            parts.unknown["lr"] = f"an LR is of type {type(group['lr']).__name__}"
        yield ParamGroup(
            lr=lr,
            initial_lr=number(group.get("initial_lr")),
            max_lr=number(group.get("max_lr")),
            min_lr=number(group.get("min_lr")),
            weight_decay=number(group.get("weight_decay")),
            num_params=len(params),
            num_elements=sum(int(p.numel()) for p in params),
            num_states=sum(1 for p in params if optimizer.state.get(p)),
            settings=_settings(group),
        )


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """The plain options of a group that have no check of their own: betas, momentum, eps, flags."""
    settings: dict[str, Any] = {}
    for name, value in group.items():
        if name in COMPARED_APART or name in IMPLEMENTATION:
            continue
        if value is None or isinstance(value, (bool, int, float, str)):
            settings[name] = plain_numbers(value)  # as a manifest holds it: JSON has no infinity
        elif isinstance(value, (tuple, list)) and all(isinstance(item, (bool, int, float, str)) for item in value):
            settings[name] = plain_numbers(list(value))
    return settings


def parameter_order(optimizers: Sequence[Any], models: Sequence[Any]) -> str:
    """Digest of which model parameter is at each position of the optimizers; "" when none is a model's own."""
    places = {id(p): place for place, p in enumerate(p for model in models for p in model.parameters())}
    held = [[places.get(id(p), -1) for p in group["params"]] for _, group in groups_of(optimizers)]
    return digest(repr(held).encode()) if any(place >= 0 for group in held for place in group) else ""


def held_by(optimizer: Any, group: Mapping[str, Any]) -> Iterator[tuple[Any, str, Any]]:
    """Every tensor that an optimizer keeps of a group but the step counts: its parameter, its name, and itself."""
    for param in group["params"]:
        state = optimizer.state.get(param)
        for key in sorted(state, key=str) if isinstance(state, Mapping) else ():
            if key != "step" and hasattr(state[key], "numel"):
                yield param, str(key), state[key]


def _type_as_loaded(held: Any, param: Any) -> Any:
    """The type in which torch's own `load_state_dict` puts part of a state back: that of its parameter."""
    return param.dtype if param.is_floating_point() else held.dtype


def _moments_and_each(optimizers: Sequence[Any]) -> tuple[str, str]:
    """Digest of all that the optimizers keep of their parameters, and 16 bits of each tensor."""
    held = [(param, thing) for optimizer, group in groups_of(optimizers) for param, _, thing in held_by(optimizer, group)]
    types = (_type_as_loaded(thing, param) for param, thing in held)
    return digest_and_each((own_shard(thing) for _, thing in held), types)


def collect_optimizers(optimizers: Iterable[Any]) -> tuple[Any, ...]:
    """Torch's own optimizers behind the wrappers, each once, in order."""
    seen: dict[int, Any] = {}
    for optimizer in optimizers:
        raw = raw_optimizer(optimizer)
        seen.setdefault(id(raw), raw)
    return tuple(seen.values())


def steppers_of(optimizers: Iterable[Any]) -> tuple[Any, ...]:
    """Optimizers whose `step` is one optimizer step; none under DeepSpeed, which steps its inner optimizer by groups."""
    found = tuple(optimizers)
    for thing in found:
        for _ in range(5):
            if type(thing).__module__.startswith("deepspeed.runtime"):
                return ()
            thing = getattr(thing, "optimizer", None)
    return collect_optimizers(found)


# ---- which tensors differ --------------------------------------------------------------------------------------------

def weights_apart(each: str, live: LiveState) -> list[str]:
    """The names of weights whose 16 bits (`weights_and_each`) are others now; [] where the models have other tensors."""
    names = [name for model in live.models for name, _ in model.named_parameters()]
    return [names[at] for at in apart(each, weights_and_each(live)[1])]


def moments_apart(each: str, live: LiveState) -> list[str]:
    """The moments whose 16 bits are others now, with the names of their parameters; [] where there are other tensors."""
    names = names_of(live.models)
    held = [(param, key) for optimizer, group in groups_of(live.optimizers) for param, key, _ in held_by(optimizer, group)]
    found = [held[at] for at in apart(each, _moments_and_each(live.optimizers)[1])]
    return [f"{key} of {names.get(id(param), 'a parameter of no model')}" for param, key in found]

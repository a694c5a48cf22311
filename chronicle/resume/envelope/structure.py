"""What a launch begins with and keeps: tied weights, training modes, dtypes, frozen layers, and an LR that is the scheduler's.

Recorded right before the first step, compared at every look by identity and flags: no tensor is read.

The first forward passes of a launch: one in training and one in evaluation mode, watched once each and then left alone.

In training: matrix products under autocast give its dtype. In evaluation: no dropout is active, and a spectral norm has its
estimate. The hooks do not keep the model from being copied and pickled; a compiled model is not hooked.
"""

import functools
import math
import re
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chronicle.resume.compiled import ModelHook, is_compiling_here, when_compiled
from chronicle.resume.envelope.breach import BreachKind
from chronicle.resume.envelope.motion import lr_of
from chronicle.resume.faults import shield

StructureBreach = tuple[BreachKind, str]
# attributes with which modules say that layers are frozen; not when, nor of batch statistics alone
FROZEN_NAME = re.compile(r"(is_)?frozen(_(stages|layers|backbone|encoder))?|freeze(_(backbone|encoder|stages|layers|at))?")


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
        self._quick = self._now()  # when it was last asked

    def has_new_parameters(self) -> bool:
        """Whether the models hold other parameters than at the beginning: a layer was replaced or added."""
        return [id(p) for model in self._models for p in model.parameters()] != self._ids

    def has_turned(self) -> bool:
        """Whether a whole model changed its mode, tied weights came apart or the dtype changed, since this was last asked.

        Cheap enough for every step.
        """
        now = self._now()
        if now == self._quick:
            return False
        self._quick = now
        return True

    def _now(self) -> tuple[Any, ...]:
        tied = [id(module._parameters.get(attribute)) for group in self._ties for module, attribute, _ in group]
        return [model.training for model in self._models], tied, self._params[-1].dtype if self._params else None

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
    """What the models say of themselves and is not so at the first step: tied embeddings, frozen layers."""
    for wrapped in models:
        model = getattr(wrapped, "module", wrapped)
        if not hasattr(model, "peft_config"):
            yield from _untied_embeddings(model)
        yield from _unfrozen(model)


def _untied_embeddings(model: Any) -> Iterator[StructureBreach]:
    config, inputs = getattr(model, "config", None), getattr(model, "get_input_embeddings", None)
    outputs = getattr(model, "get_output_embeddings", None)
    if getattr(config, "tie_word_embeddings", False) is not True or inputs is None or outputs is None:
        return
    first, last = getattr(inputs(), "weight", None), getattr(outputs(), "weight", None)
    if first is None or last is None or first is last or first.shape != last.shape or _same_storage(first, last):
        return
    yield BreachKind.UNTIED, "the configuration says `tie_word_embeddings`, but input and output embeddings are two tensors"


def _unfrozen(model: Any) -> Iterator[StructureBreach]:
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


# ---- the first forward passes ------------------------------------------------------------------------------------------


Tell = Callable[[BreachKind, str], None]


class ForwardProbe:
    """Watches the first passes through one model. `resumed()`: whether this launch loaded a state."""

    def __init__(
        self,
        model: Any,
        tell: Tell,
        resumed: Callable[[], bool],
        batch_size: Callable[[], int | None],
        lost: Callable[[Exception], None],
    ) -> None:
        self.lost = lost  # told of an error of the probe itself
        self._tell, self._resumed, self._batch_size = tell, resumed, batch_size
        self._trained, self._evaluated = False, False
        self._stays = False  # something was compiled, maybe a function that calls the model and is made for its hooks
        self._leaves: list[Any] = []  # handles on the layers, during one pass
        self._mode: Any = None
        _probes[model] = self
        self._handles = [
            model.register_forward_pre_hook(_hook(_before), with_kwargs=True),
            model.register_forward_hook(_hook(_after), always_call=True),
        ]
        when_compiled(model, self.remove)  # dynamo would trace what the probe does to a pass

    def remove(self) -> None:
        """Take every hook away."""
        self._leave_layers()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _leave_layers(self) -> None:
        for handle in self._leaves:
            handle.remove()
        self._leaves = []

    def begin(self, model: Any, inputs: Mapping[str, Any]) -> None:
        """A pass begins."""
        import torch

        if model.training and (self._trained or self._leaves):
            return
        if model.training:
            self._look_at_rows(inputs)
        if model.training and torch.is_grad_enabled() and is_compiling_here(model):
            self._trained = self._stays = True
        elif model.training and torch.is_grad_enabled():
            layers = [m for m in model.modules() if type(m) in (torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d)]
            see = ModelHook(shield(self._see_output, self._lose))
            self._leaves = [layer.register_forward_hook(see) for layer in layers[:256]]
        elif not model.training and not self._evaluated and self._mode is None:
            self._look_at_norms(model)
            if is_compiling_here(model):
                self._evaluated = self._stays = True
            elif not any(part.training for part in model.modules()):  # dropout that was left on by its mode is meant
                self._mode = _dropout_mode(lambda what: self._tell(BreachKind.EVAL_DROPOUT, what))
                self._mode.__enter__()

    def end(self, model: Any) -> None:
        """A pass has ended, or raised."""
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
            self._mode, self._evaluated = None, True
        elif self._leaves:
            self._leave_layers()
            self._trained = True
        if self._trained and self._evaluated and not self._stays:
            self.remove()

    def _lose(self, problem: Exception) -> None:
        self.remove()
        self.lost(problem)

    def _see_output(self, module: Any, args: Any, output: Any) -> None:
        import torch

        device = getattr(output, "device", None)
        if device is None or not torch.is_autocast_enabled(device.type):
            return
        promised = torch.get_autocast_dtype(device.type)
        if output.dtype != promised and output.dtype.is_floating_point and output.dtype != torch.float64:
            layer = f"a {type(module).__name__} of {' × '.join(map(str, module.weight.shape))}"
            self._tell(BreachKind.AUTOCAST, f"{layer} computes in {_plain(output.dtype)} under autocast to {_plain(promised)}")

    def _look_at_rows(self, inputs: Mapping[str, Any]) -> None:
        """One row of tokens beside a whole batch of something else: a processor joined the rows."""
        size = self._batch_size()
        tokens: Any = inputs.get("input_ids")
        if size is None or size < 2 or getattr(tokens, "ndim", 0) != 2 or len(tokens) != 1:
            return
        for name, value in inputs.items():
            if getattr(value, "ndim", 0) >= 2 and len(value) == size and value.dtype.is_floating_point:
                self._tell(BreachKind.DATA_ROWS, f"`input_ids` has one row, `{name}` has {size}, the batch size of the loader")

    def _look_at_norms(self, model: Any) -> None:
        if self._trained or self._resumed():
            return
        for name, module in model.named_modules():
            hooks = getattr(module, "_forward_pre_hooks", {})
            if any(type(hook).__name__ == "SpectralNorm" for hook in hooks.values()):
                words = f"`{name}` is evaluated before its spectral norm was estimated in a training pass"
                self._tell(BreachKind.EVAL_NORM, words)
                return


_probes: "weakref.WeakKeyDictionary[Any, ForwardProbe]" = weakref.WeakKeyDictionary()


def _before(module: Any, args: Any, kwargs: Any) -> None:
    probe = _probes.get(module)
    if probe is not None:
        probe.begin(module, kwargs)


def _after(module: Any, args: Any, output: Any) -> None:
    probe = _probes.get(module)
    if probe is not None:
        probe.end(module)


def _failed(problem: Exception) -> None:
    """The pass goes on, whatever a probe thinks of it; none of them looks any more."""
    for probe in tuple(_probes.values()):
        probe.remove()
        probe.lost(problem)


@functools.cache
def _hook(work: Callable[..., None]) -> ModelHook:
    """A hook that no graph contains and no pickle of the model keeps."""
    return ModelHook(shield(work, _failed))


def _dropout_mode(tell: Callable[[str], None]) -> Any:
    """A mode in which active dropout is told; every function gives the result that it gives without it."""
    from torch.overrides import TorchFunctionMode

    class DropoutMode(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            name = getattr(function, "__name__", "")
            if "dropout" in name:
                p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
                on = kwargs.get("training", args[2] if len(args) > 2 else True)
                if on and isinstance(p, (int, float)) and p > 0:
                    tell(f"`{name}` with p={p:g} is active in evaluation mode")
            elif name == "scaled_dot_product_attention":
                p = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
                if p:
                    tell(f"attention dropout of {p:g} is active in evaluation mode")
            return function(*args, **kwargs)

    return DropoutMode()


def can_be_hooked(model: Any) -> bool:
    """Not a compiled model: a hook would compile it again."""
    if "torch._dynamo" in sys.modules and hasattr(model, "_orig_mod"):
        return False
    return getattr(model, "_compiled_call_impl", None) is None and hasattr(model, "register_forward_pre_hook")

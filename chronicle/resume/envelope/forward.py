"""The first forward passes of a launch: one in training and one in evaluation mode, watched once each and then left alone.

In training: matrix products under autocast give its dtype. In evaluation: no dropout is active, and a spectral norm has its
estimate. Hooks are plain functions outside the module, so that it can be copied and pickled; a compiled model is not hooked.
"""

import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from chronicle.resume.envelope.breach import BreachKind

__all__ = ["ForwardProbe"]

Tell = Callable[[BreachKind, str], None]


class ForwardProbe:
    """Watches the first passes through one model. `resumed()`: whether this launch loaded a state."""

    def __init__(self, model: Any, tell: Tell, resumed: Callable[[], bool], batch_size: Callable[[], int | None]) -> None:
        self._tell, self._resumed, self._batch_size = tell, resumed, batch_size
        self._trained, self._evaluated = False, False
        self._leaves: list[Any] = []  # handles on the layers, during one pass
        self._mode: Any = None
        _probes[model] = self
        self._handles = [
            model.register_forward_pre_hook(_before, with_kwargs=True),
            model.register_forward_hook(_after, always_call=True),
        ]

    def remove(self) -> None:
        """Take every hook away."""
        for handle in (*self._handles, *self._leaves):
            handle.remove()
        self._handles, self._leaves = [], []

    def begin(self, model: Any, inputs: Mapping[str, Any]) -> None:
        """A pass begins."""
        import torch

        if model.training and not self._trained and not self._leaves:
            self._look_at_rows(inputs)
        if model.training and not self._trained and not self._leaves and torch.is_grad_enabled():
            layers = [m for m in model.modules() if type(m) in (torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d)]
            self._leaves = [layer.register_forward_hook(self._see_output) for layer in layers[:256]]
        elif not model.training and not self._evaluated and self._mode is None:
            self._look_at_norms(model)
            if not any(part.training for part in model.modules()):  # dropout that was left on by its mode is meant
                self._mode = _dropout_mode(lambda what: self._tell(BreachKind.EVAL_DROPOUT, what))
                self._mode.__enter__()

    def end(self, model: Any) -> None:
        """A pass has ended, or raised."""
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
            self._mode, self._evaluated = None, True
        elif self._leaves:
            for handle in self._leaves:
                handle.remove()
            self._leaves, self._trained = [], True
        if self._trained and self._evaluated:
            self.remove()

    def _see_output(self, module: Any, args: Any, output: Any) -> None:
        import torch

        device = getattr(output, "device", None)
        if device is None or not torch.is_autocast_enabled(device.type):
            return
        promised = torch.get_autocast_dtype(device.type)
        if output.dtype != promised and output.dtype.is_floating_point and output.dtype != torch.float64:
            shape = " × ".join(map(str, module.weight.shape))
            found, wanted = str(output.dtype).removeprefix("torch."), str(promised).removeprefix("torch.")
            layer = f"a {type(module).__name__} of {shape}"
            self._tell(BreachKind.AUTOCAST, f"{layer} computes in {found} under autocast to {wanted}")

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


def _is_compiling() -> bool:
    import torch

    return bool(torch.compiler.is_compiling())


def _before(module: Any, args: Any, kwargs: Any) -> None:
    if _is_compiling():
        return
    probe = _probes.get(module)
    if probe is not None:
        try:
            probe.begin(module, kwargs)
        except Exception:  # noqa: BLE001 the pass goes on, whatever the probe thinks of it
            probe.remove()


def _after(module: Any, args: Any, output: Any) -> None:
    if _is_compiling():
        return
    probe = _probes.get(module)
    if probe is not None:
        try:
            probe.end(module)
        except Exception:  # noqa: BLE001 as above
            probe.remove()


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

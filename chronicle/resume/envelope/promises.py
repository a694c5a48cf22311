"""What a training loop promises between two optimizer steps: gradients are zeroed, accumulated as declared, and clipped.

For a few steps after the start and after every save, hooks on one parameter per optimizer count the backward passes and see
whether the first of them began from no gradient; calls of `clip_grad_norm_` are noted. Outside these windows nothing is hooked.
"""

import math
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from chronicle.resume.envelope.breach import Breach, BreachKind
from chronicle.resume.envelope.samples import Later, Snapshot

__all__ = ["Promises"]

WINDOW = 3  # intervals between optimizer steps
REPEATED = 2  # clippings that are wrong, until it is told


class Probe:
    """Hooks on one parameter: backward passes since the last step, and whether one of them began from no gradient."""

    def __init__(self, param: Any, later: Later) -> None:
        self._param, self._later = weakref.ref(param), later
        self.passes, self.clean, self._candidate = 0, False, False
        self._old: list[Snapshot] = []
        self._handles = [
            param.register_hook(self._before),
            param.register_post_accumulate_grad_hook(self._after),
        ]

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before(self, gradient: Any) -> None:
        param = self._param()
        old = None if param is None else param.grad
        self._candidate = old is None
        if old is not None and not self.clean and len(self._old) < 64:
            self._old.append(Snapshot([old]))

    def _after(self, param: Any) -> None:
        self.passes += 1
        self.clean = self.clean or self._candidate

    def take(self, judge: Callable[[int, bool], None]) -> None:
        """End of an interval: `judge(passes, clean)`, at once or when the samples are there."""
        passes, clean, old = self.passes, self.clean, tuple(self._old)
        self.passes, self.clean, self._old = 0, False, []
        self._later.add(old, lambda: judge(passes, clean or any(_is_zero(snapshot) for snapshot in old)))


def _is_zero(snapshot: Snapshot) -> bool:
    row = snapshot.rows()[0]
    return row is None or not row.any()  # what cannot be sampled counts as zero: unknown accuses nobody


class _Window:
    """One optimizer under probe."""

    def __init__(self, probe: Probe) -> None:
        self.probe, self.intervals = probe, 0
        self.single = 0  # intervals with one backward pass


class Promises:
    """The windows of one launch. `owned()` gives the ids of the parameters that any optimizer steps."""

    def __init__(
        self, tell: Callable[[Breach], object], later: Later, owned: Callable[[], Collection[int]]
    ) -> None:
        self._tell, self._later, self._owned = tell, later, owned
        self._windows: weakref.WeakKeyDictionary[Any, _Window] = weakref.WeakKeyDictionary()
        self._worked = False  # a probe has seen a backward pass
        self._clips: list[tuple[str, int]] = []  # what was wrong with a clipping, and how many parameters it had
        self._wrong: dict[str, int] = {}

    @property
    def armed(self) -> bool:
        """Whether any window is open."""
        return bool(self._windows)

    def arm(self, optimizer: Any, params: Iterable[Any]) -> None:
        """Open a window for this optimizer, at one of its steps."""
        if optimizer in self._windows:
            return
        chosen = [p for p in params if p.requires_grad and p.is_leaf and p.grad is not None and not p.grad.is_sparse]
        if not chosen:
            return
        self._windows[optimizer] = _Window(Probe(chosen[-1], self._later))
        _watch_clipping(self)

    def before_step(self, optimizer: Any, step: int | None, declared: int | None) -> None:
        """An interval of this optimizer ends. `declared`: backward passes per step that the trainer announced."""
        self._judge_clips(step)
        window = self._windows.get(optimizer)
        if window is None:
            return
        window.intervals += 1
        last = window.intervals >= WINDOW
        window.probe.take(lambda passes, clean: self._judge(window, passes, clean, step, declared))
        if last:
            self._disarm(optimizer, window)

    def end(self) -> None:
        """Remove every hook."""
        for optimizer, window in list(self._windows.items()):
            self._disarm(optimizer, window)

    def _disarm(self, optimizer: Any, window: _Window) -> None:
        window.probe.remove()
        self._windows.pop(optimizer, None)
        if not self._windows:
            _leave_clipping(self)

    def _judge(self, window: _Window, passes: int, clean: bool, step: int | None, declared: int | None) -> None:
        if passes == 0:
            return  # unused in this interval, or a framework that brings the gradient itself
        self._worked = True
        if not clean:
            words = "no gradient was zeroed since the last step: gradients add up over steps"
            self._tell(Breach(kind=BreachKind.NOT_ZEROED, step=step, words=words, seen=step))
        window.single = window.single + 1 if passes == 1 else -WINDOW
        if declared is not None and declared > 1 and window.single >= WINDOW:
            began = None if step is None else max(1, step - WINDOW)
            words = f"{declared} micro-batches a step are declared, but the optimizer steps after every one"
            self._tell(Breach(kind=BreachKind.ACCUMULATION, step=began, words=words, seen=step))

    # ---- clipping --------------------------------------------------------------------------------------------------

    def clipped(self, params: Sequence[Any], max_norm: float) -> None:
        """`clip_grad_norm_` was called with these parameters."""
        if not math.isfinite(max_norm):
            return  # a way to measure the norm
        fresh = any(window.probe.passes for window in self._windows.values())
        if not params:
            self._clips.append(("it got no parameters: an empty list, or a generator that was used up", REPEATED))
        elif self._worked and not fresh:
            self._clips.append(("it is called after the step, when the gradients were used already", 1))
        elif not {id(p) for p in params} & set(self._owned()):
            self._clips.append(("it got parameters that no optimizer steps", 1))
        elif self.scaled(params):
            self._clips.append(("it is called before the gradients are unscaled", REPEATED))
        else:
            self._wrong.clear()

    scaled: Callable[[Sequence[Any]], bool] = staticmethod(lambda params: False)  # set where a loss scaler is known

    def _judge_clips(self, step: int | None) -> None:
        clips, self._clips = self._clips, []
        for words, weight in clips:
            self._wrong[words] = self._wrong.get(words, 0) + weight
            if self._wrong[words] >= REPEATED:
                told = f"`clip_grad_norm_` clips nothing: {words}"
                self._tell(Breach(kind=BreachKind.CLIPPING, step=step, words=told, seen=step))


_listeners: "weakref.WeakSet[Promises]" = weakref.WeakSet()
_original: list[Any] = []


def _watch_clipping(listener: Promises) -> None:
    """Listen to `torch.nn.utils.clip_grad`, by the inner function that every way of calling it ends in."""
    _listeners.add(listener)
    module = sys.modules.get("torch.nn.utils.clip_grad")
    inner = getattr(module, "_clip_grads_with_norm_", None)
    if inner is None or _original:
        return
    _original.append(inner)

    def listening(parameters: Any, max_norm: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        if not torch.compiler.is_compiling():
            parameters = _report_clipping(parameters, max_norm)
        return inner(parameters, max_norm, *args, **kwargs)

    module._clip_grads_with_norm_ = listening  # type: ignore[union-attr]


def _report_clipping(parameters: Any, max_norm: Any) -> Any:
    listed = [parameters] if hasattr(parameters, "grad") else list(parameters)
    for listener in tuple(_listeners):
        try:
            listener.clipped(listed, float(max_norm))
        except Exception:  # noqa: BLE001 clipping goes on, whatever the listener thinks of it
            _listeners.discard(listener)
    return listed


def _leave_clipping(listener: Promises) -> None:
    _listeners.discard(listener)
    module = sys.modules.get("torch.nn.utils.clip_grad")
    if not _listeners and _original and module is not None:
        module._clip_grads_with_norm_ = _original.pop()  # type: ignore[attr-defined]

"""What a training loop promises between two steps: gradients zeroed, accumulated as declared and clipped.

For a few steps after the start and after every save, hooks on one parameter per optimizer count the backward passes and see
whether the first of them began from no gradient; calls of `clip_grad_norm_` are noted. Outside these windows nothing is hooked.
"""

import math
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from chronicle.resume.compiled import on_gradient, outside_graphs, skip_in_graphs
from chronicle.resume.envelope.breach import BreachKind, BreachLog
from chronicle.resume.faults import last_resort, raised_by_script, shield
from chronicle.resume.patches import change, undo
from chronicle.resume.samples import DelayedReads, Snapshot

WINDOW = 3  # intervals between optimizer steps
REPEATED = 2  # clippings that are wrong, until it is told


class _Window:
    """One optimizer under hooks on one of its parameters, for some intervals between its steps.

    It counts backward passes since the last step, and sees whether one of them began from no gradient.
    """

    def __init__(self, param: Any, later: DelayedReads, lost: Callable[[Exception], None]) -> None:
        self._param, self._later = weakref.ref(param), later
        self.intervals = 0
        self.single = 0  # intervals with one backward pass
        self.passes, self._clean = 0, False
        self._began_clean: bool | None = None  # whether this pass began from no gradient; None: nobody saw its beginning
        self._old: list[Snapshot] = []
        self._handles = [
            param.register_hook(on_gradient(self._before, lost)),
            param.register_post_accumulate_grad_hook(on_gradient(self._after, lost)),
        ]

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before(self, gradient: Any) -> None:
        param = self._param()
        old = None if param is None else param.grad
        self._began_clean = old is None
        if old is not None and not self._clean and len(self._old) < 64:
            self._old.append(Snapshot([old]))

    def _after(self, param: Any) -> None:
        self.passes += 1
        self._clean = self._clean or self._began_clean is not False  # FSDP brings a gradient to its shard without a beginning
        self._began_clean = None

    def take(self, judge: Callable[[int, bool], None]) -> None:
        """End of an interval: `judge(passes, clean)`, at once or when the samples are there."""
        passes, clean, old = self.passes, self._clean, tuple(self._old)
        self.passes, self._clean, self._old = 0, False, []
        self._later.add(old, lambda: judge(passes, clean or any(map(_is_zero, old))))


def _is_zero(snapshot: Snapshot) -> bool:
    row = snapshot.rows()[0]
    return row is None or not row.any()  # what cannot be sampled counts as zero: unknown accuses nobody


class Promises:
    """The windows of one launch. `owned()` gives the ids of the parameters that any optimizer steps."""

    def __init__(
        self,
        log: BreachLog,
        later: DelayedReads,
        owned: Callable[[], Collection[int]],
        scaled: Callable[[Sequence[Any]], bool],
        lost: Callable[[Exception], None],
    ) -> None:
        self._log, self._later, self._owned = log, later, owned
        self._scaled, self.lost = scaled, lost  # whether a loss scaler has still to unscale these; told of an error of a hook
        self.windows: weakref.WeakKeyDictionary[Any, _Window] = weakref.WeakKeyDictionary()  # that are open
        self._worked = False  # a hook has seen a backward pass
        self._clips: list[tuple[str, int]] = []  # what was wrong with a clipping, and how much it weighs
        self._wrong: dict[str, int] = {}

    def arm(self, optimizer: Any, params: Iterable[Any]) -> None:
        """Open a window for this optimizer, at one of its steps."""
        if optimizer in self.windows:
            return
        chosen = [p for p in params if p.requires_grad and p.is_leaf and p.grad is not None and not p.grad.is_sparse]
        if not chosen:
            return
        self.windows[optimizer] = _Window(chosen[-1], self._later, self.lost)
        _listen(self)

    def before_step(self, optimizer: Any, step: int | None, declared: int | None) -> None:
        """An interval of this optimizer ends. `declared`: backward passes per step that the trainer announced."""
        self._judge_clips(step)
        window = self.windows.get(optimizer)
        if window is None:
            return
        window.intervals += 1
        window.take(lambda passes, clean: self._judge(window, passes, clean, step, declared))
        if window.intervals >= WINDOW:
            self._disarm(optimizer, window)

    def end(self) -> None:
        """Remove every hook."""
        for optimizer, window in list(self.windows.items()):
            self._disarm(optimizer, window)

    def _disarm(self, optimizer: Any, window: _Window) -> None:
        window.remove()
        self.windows.pop(optimizer, None)
        if not self.windows:
            _leave(self)

    def _judge(self, window: _Window, passes: int, clean: bool, step: int | None, declared: int | None) -> None:
        if passes == 0:
            return  # unused in this interval, or a framework that brings the gradient itself
        self._worked = True
        if not clean:
            words = "no gradient was zeroed since the last step: gradients add up over steps"
            self._log.tell(BreachKind.NOT_ZEROED, words, step=step)
        window.single = window.single + 1 if passes == 1 else -WINDOW
        if declared is not None and declared > 1 and window.single >= WINDOW:
            words = f"{declared} micro-batches a step are declared, but the optimizer steps after every one"
            began = None if step is None else max(1, step - WINDOW)
            self._log.tell(BreachKind.ACCUMULATION, words, step=began, seen=step)

    # ---- clipping --------------------------------------------------------------------------------------------------

    def clipped(self, params: Sequence[Any], max_norm: float) -> None:
        """`clip_grad_norm_` was called with these parameters."""
        if not math.isfinite(max_norm):
            return  # a way to measure the norm
        fresh = any(window.passes for window in self.windows.values())
        if not params:
            self._clips.append(("it got no parameters: an empty list, or a generator that was used up", REPEATED))
        elif self._worked and not fresh:
            self._clips.append(("it is called after the step, when the gradients were used already", 1))
        elif not {id(p) for p in params} & set(self._owned()):
            self._clips.append(("it got parameters that no optimizer steps", 1))
        elif self._scaled(params):
            self._clips.append(("it is called before the gradients are unscaled", REPEATED))
        else:
            self._wrong.clear()

    def _judge_clips(self, step: int | None) -> None:
        clips, self._clips = self._clips, []
        for words, weight in clips:
            self._wrong[words] = self._wrong.get(words, 0) + weight
            if self._wrong[words] >= REPEATED:
                self._log.tell(BreachKind.CLIPPING, f"`clip_grad_norm_` clips nothing: {words}", step=step)


# ---- listening to torch --------------------------------------------------------------------------------------------------

_listeners: "weakref.WeakSet[Promises]" = weakref.WeakSet()


def _listen(listener: Promises) -> None:
    """Hear of every clipping, as long as a window is open: it is changed where all ways of calling it end (`patches.py`)."""
    _listeners.add(listener)
    change("clipping", _listening)


def _listening(inner: Any) -> Any:
    report = outside_graphs(shield(_clipped, _lose))

    def listening(first: Any, *args: Any, **kwargs: Any) -> Any:
        if _listeners:  # else the last one was collected with its session
            first = list(first) if isinstance(first, Iterator) else first  # a generator can be read once
            report(first, *args, **kwargs)
        return inner(first, *args, **kwargs)

    return skip_in_graphs(listening)


def _clipped(parameters: Any, max_norm: Any, *_: Any, **__: Any) -> None:
    for listener in tuple(_listeners):
        try:
            listener.clipped([parameters] if hasattr(parameters, "grad") else parameters, float(max_norm))
        except Exception as problem:
            if raised_by_script(problem):
                raise
            _listeners.discard(listener)  # clipping goes on, whatever the listener thinks of it
            last_resort(listener.lost, problem)


def _lose(problem: Exception) -> None:
    for listener in tuple(_listeners):
        _listeners.discard(listener)
        listener.lost(problem)


def _leave(listener: Promises) -> None:
    _listeners.discard(listener)
    if not _listeners:
        undo("clipping")

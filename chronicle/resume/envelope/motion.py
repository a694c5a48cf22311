"""Gradients and parameters over one optimizer step, by samples: do they move, are they finite, does a layer die.

A look takes samples before a step, and again before a later step of the same optimizer; both are judged when they are on the
host. A parameter must move only where an update of this LR and gradient is larger than the spacing of its numbers: low
precision, LR 0 and zero gradients are healthy. No torch call waits for the device.

What a training loop promises between two optimizer steps: gradients are zeroed, accumulated as declared, and clipped.

For a few steps after the start and after every save, hooks on one parameter per optimizer count the backward passes and see
whether the first of them began from no gradient; calls of `clip_grad_norm_` are noted. Outside these windows nothing is hooked.
"""

import math
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from chronicle.resume.compiled import outside_graphs
from chronicle.resume.envelope.breach import Breach, BreachKind
from chronicle.resume.envelope.samples import DelayedReads, Snapshot
from chronicle.resume.faults import last_resort, raised_by_script, shield

__all__ = ["Motion", "Promises", "find_orphans", "lr_of"]

FULL_LOOKS, FULL_TENSORS = 3, 512  # the first looks of an optimizer see every tensor, up to so many
TENSORS = 32  # per later look, in turn
STILL_STEPS = 3  # without any movement, until it is told
ALIVE_LOOKS, DEAD_LOOKS, CHANCE = 20, 3, 1e-9  # a layer dies when so many zero gradients in a row are no chance
SAFETY = 1e-2  # of an update lr * min(|g|, 1): optimizers scale it differently


@dataclass(slots=True)
class _Life:
    """How often the sampled gradient of one tensor was zero."""

    looks: int = 0
    zeros: int = 0  # before the present row of zeros
    row: int = 0
    since: int | None = None

    def see(self, zero: bool, step: int | None) -> bool:
        """Count one look; True when the tensor has died."""
        if not zero:
            self.looks, self.zeros, self.row, self.since = self.looks + 1 + self.row, self.zeros + self.row, 0, None
            return False
        self.row += 1
        self.since = step if self.row == 1 else self.since
        if self.looks < ALIVE_LOOKS or self.row < DEAD_LOOKS:
            return False
        return self.row * math.log((self.zeros + 1) / (self.looks + 2)) < math.log(CHANCE)


@dataclass(slots=True)
class _Watched:
    """What is known of one optimizer."""

    looks: int = 0
    next: int = 0  # the tensor with which the next look begins
    open: "_Look | None" = None
    still: int = 0
    still_since: int | None = None
    bad: int = 0  # looks in a row with gradients that are not finite
    lives: dict[str, _Life] = field(default_factory=dict)
    not_finite: frozenset[str] = frozenset()  # infinite from the beginning: masks kept as parameters


@dataclass(frozen=True, slots=True)
class _Look:
    step: int | None
    params: Sequence[Any]
    names: Sequence[str]
    lrs: Sequence[float]  # 0.0: not known
    spacing: Sequence[float]
    graded: Sequence[bool]
    scaled: bool  # a loss scaler works inside the step and may skip it
    before: Snapshot
    gradients: Snapshot


class Motion:
    """The looks at every optimizer of a launch. `tell(breach)` gets what is wrong."""

    def __init__(self, tell: Callable[[Breach], object], later: DelayedReads) -> None:
        self._tell, self._later = tell, later
        self._watched: weakref.WeakKeyDictionary[Any, _Watched] = weakref.WeakKeyDictionary()

    def close(self, key: Any, step: int | None) -> bool:
        """The look that is open for `key` ends: its next step is about to begin, or a save. False: none was open."""
        known = self._watched.get(key)
        look = known.open if known is not None else None
        if known is None or look is None:
            return False
        known.open = None
        after = Snapshot(look.params)
        self._later.add((look.before, look.gradients, after), lambda: self._judge(known, look, after, step))
        return True

    def close_all(self, step: int | None) -> None:
        """A save: judge what is open."""
        for key in list(self._watched):
            self.close(key, step)

    def open(self, key: Any, groups: Sequence[Mapping[str, Any]], names: Mapping[int, str], step: int | None) -> None:
        """Take samples before a step of `key`, an optimizer, or the engine that steps these groups."""
        known = self._watched.setdefault(key, _Watched())
        chosen = self._choose(known, [(p, lr_of(group)) for group in groups for p in group["params"]])
        if not chosen:
            return
        params = [p for p, _ in chosen]
        gradients = [p.grad for p in params]
        known.looks += 1
        known.open = _Look(
            step=step,
            params=params,
            names=[names.get(id(p), f"parameter of shape {tuple(p.shape)}") for p in params],
            lrs=[lr or 0.0 for _, lr in chosen],
            spacing=[_spacing(p) for p in params],
            graded=[_is_alike(p, g) for p, g in zip(params, gradients, strict=True)],
            scaled=getattr(key, "grad_scale", None) is not None or getattr(key, "found_inf", None) is not None,
            before=Snapshot(params),
            gradients=Snapshot([g if _is_alike(p, g) else None for p, g in zip(params, gradients, strict=True)]),
        )

    def forget(self) -> None:
        """A state was loaded: samples from before it say nothing."""
        self._watched.clear()

    def _choose(self, known: _Watched, every: list[tuple[Any, float | None]]) -> list[tuple[Any, float | None]]:
        every = [one for one in every if one[0].requires_grad]
        most = FULL_TENSORS if known.looks < FULL_LOOKS else TENSORS
        if len(every) <= most:
            return every
        begin = known.next % len(every)
        known.next = begin + most
        return (every[begin:] + every[:begin])[:most]

    def _judge(self, known: _Watched, look: _Look, after: Snapshot, now: int | None) -> None:
        import numpy as np

        old, gradients, new = look.before.rows(), look.gradients.rows(), after.rows()
        moved = should_move = any_alive = False
        poisoned, bad, zero = [], [], []
        for index, name in enumerate(look.names):
            was, g, is_ = old[index], gradients[index], new[index]
            if was is None or is_ is None or len(was) != len(is_):
                moved = True  # resized, or moved to another storage: not comparable
                continue
            if not np.isfinite(is_).all() and (np.isnan(is_).any() or np.isfinite(was).all()):
                poisoned.append((name, bool(np.isfinite(was).all())))
            changed = bool((was != is_).any())
            moved = moved or changed
            if g is None or not look.graded[index] or len(g) != len(was):
                continue
            size = np.abs(g)
            if not np.isfinite(size).all():
                bad.append(name)
            elif not size.any():
                zero.append(name)
                continue
            elif look.lrs[index] and not changed and len(size) == len(was):
                update = look.lrs[index] * np.minimum(size, 1.0) * SAFETY
                should_move = should_move or bool((update > np.abs(was) * look.spacing[index] + 1e-30).any())
            any_alive = True
            known.lives.setdefault(name, _Life()).see(False, look.step)
        self._judge_values(known, look, poisoned, bad, now)
        self._judge_motion(known, look, moved, should_move, now)
        for name in zero if any_alive else ():
            life = known.lives.setdefault(name, _Life())
            if life.see(True, look.step):
                words = f"the gradient of `{name}` has been exactly zero in {life.row} looks; it was not in {life.looks} before"
                self._tell(Breach(kind=BreachKind.DEAD, step=life.since, words=words, seen=now))

    def _judge_values(
        self, known: _Watched, look: _Look, poisoned: list[tuple[str, bool]], bad: list[str], now: int | None
    ) -> None:
        if look.scaled:
            bad = []  # the scaler skips this step by itself
        if known.looks == 1 and not bad:
            known.not_finite = frozenset(name for name, was_finite in poisoned if not was_finite)
        poisoned = [one for one in poisoned if one[0] not in known.not_finite]
        if poisoned:
            name = poisoned[0][0]
            more = f" and {len(poisoned) - 1} more" if len(poisoned) > 1 else ""
            cause = f"; the gradient of `{bad[0]}` was not finite" if bad else ""
            words = f"`{name}`{more} holds NaN or infinity{cause}"
            self._tell(Breach(kind=BreachKind.POISONED, step=look.step, words=words, seen=now))
            return
        known.bad = known.bad + 1 if bad else 0
        if known.bad >= 2:
            words = f"the gradient of `{bad[0]}` is NaN or infinite at the step, and no loss scaler skips it"
            self._tell(Breach(kind=BreachKind.GRADIENTS, step=look.step, words=words, seen=now))

    def _judge_motion(self, known: _Watched, look: _Look, moved: bool, should_move: bool, now: int | None) -> None:
        if moved:
            known.still, known.still_since = 0, None
            return
        if not should_move or look.scaled:
            return
        known.still_since = look.step if known.still == 0 else known.still_since
        known.still += 1 if now is None or look.step is None else max(1, now - look.step)
        if known.still >= STILL_STEPS:
            words = "the optimizer steps with gradients and an LR, but none of its parameters changes"
            self._tell(Breach(kind=BreachKind.STUCK, step=known.still_since, words=words, seen=now))


def lr_of(group: Mapping[str, Any]) -> float | None:
    """The LR of a group; None where it is no number, or a tensor that would have to be fetched from a device."""
    lr: Any = group.get("lr")
    if hasattr(getattr(lr, "device", None), "type"):  # a number of NumPy has a device too, in words
        return float(lr) if lr.device.type == "cpu" and lr.numel() == 1 else None
    return float(lr) if isinstance(lr, (int, float)) else None


def _spacing(param: Any) -> float:
    import torch

    return float(torch.finfo(param.dtype).eps) if param.dtype.is_floating_point else math.inf


def _is_alike(param: Any, gradient: Any) -> bool:
    """Whether samples of both are of the same elements."""
    return (
        gradient is not None
        and not gradient.is_sparse
        and gradient.shape == param.shape
        and gradient.is_contiguous() == param.is_contiguous()
    )


# ---- parameters that no optimizer moves ------------------------------------------------------------------------------


def find_orphans(groups: Sequence[Mapping[str, Any]], owned: set[int], names: Mapping[int, str], models: Sequence[Any]) -> str:
    """Why this optimizer does not train the model, "" where it may.

    It holds parameters without a gradient that are no longer the model's, or none of its parameters has a gradient,
    while trainable parameters of the model have gradients and no optimizer (`owned`: ids) holds them.
    """
    held = [p for group in groups for p in group["params"]]
    idle = [p for p in held if p.grad is None]
    strange = [p for p in idle if id(p) not in names]
    if not held or (len(idle) < len(held) and not strange):
        return ""
    loose = [
        name
        for model in models
        for name, p in model.named_parameters()
        if p.requires_grad and p.grad is not None and id(p) not in owned
    ]
    if not loose:
        return ""
    more = f" and {len(loose) - 1} more" if len(loose) > 1 else ""
    what = "no longer belong to the model" if strange else "have no gradient"
    count = len(strange) or len(idle)
    return f"{count} of its {len(held)} parameters {what}, and no optimizer holds `{loose[0]}`{more}, which has a gradient"


# ---- gradients zeroed, accumulated, clipped ----------------------------------------------------------------------------


WINDOW = 3  # intervals between optimizer steps
REPEATED = 2  # clippings that are wrong, until it is told


class Probe:
    """Hooks on one parameter: backward passes since the last step, and whether one of them began from no gradient."""

    def __init__(self, param: Any, later: DelayedReads, lost: Callable[[Exception], None]) -> None:
        self._param, self._later = weakref.ref(param), later
        self.passes, self.clean = 0, False
        self._candidate: bool | None = None  # whether this pass began from no gradient; None: nobody saw its beginning
        self._old: list[Snapshot] = []
        before = outside_graphs(shield(self._before, lost))
        before.__torch_unserializable__ = True  # type: ignore[attr-defined]  # no warning when the model is saved whole
        self._handles = [
            param.register_hook(before),
            param.register_post_accumulate_grad_hook(outside_graphs(shield(self._after, lost))),
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
        self.clean = self.clean or self._candidate is not False  # FSDP brings a gradient to its shard without a beginning
        self._candidate = None

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
        self, tell: Callable[[Breach], object], later: DelayedReads, owned: Callable[[], Collection[int]]
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
        self._windows[optimizer] = _Window(Probe(chosen[-1], self._later, lambda problem: self.lost(problem)))
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
    lost: Callable[[Exception], None] = staticmethod(lambda problem: None)  # told of an error of a hook

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
    report = outside_graphs(shield(_report_clipping, _lose_clipping))

    def listening(parameters: Any, max_norm: Any, *args: Any, **kwargs: Any) -> Any:
        listed = parameters if hasattr(parameters, "grad") else list(parameters)  # a generator can be read once
        report(listed, max_norm)
        return inner(listed, max_norm, *args, **kwargs)

    module._clip_grads_with_norm_ = listening  # type: ignore[union-attr]


def _report_clipping(parameters: Any, max_norm: Any) -> None:
    listed = [parameters] if hasattr(parameters, "grad") else parameters
    for listener in tuple(_listeners):
        try:
            listener.clipped(listed, float(max_norm))
        except Exception as problem:
            if raised_by_script(problem):
                raise
            _listeners.discard(listener)  # clipping goes on, whatever the listener thinks of it
            last_resort(listener.lost, problem)


def _lose_clipping(problem: Exception) -> None:
    for listener in tuple(_listeners):
        _listeners.discard(listener)
        listener.lost(problem)


def _leave_clipping(listener: Promises) -> None:
    _listeners.discard(listener)
    module = sys.modules.get("torch.nn.utils.clip_grad")
    if not _listeners and _original and module is not None:
        module._clip_grads_with_norm_ = _original.pop()  # type: ignore[attr-defined]

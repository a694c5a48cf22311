"""Gradients and parameters over one optimizer step, by samples: do they move, are they finite, does a layer die.

A look takes samples before a step, and again before a later step of the same optimizer; both are judged when they are on the
host. A parameter must move only where an update of this LR and gradient is larger than the spacing of its numbers: low
precision, LR 0 and zero gradients are healthy. No torch call waits for the device.

What a training loop promises between two optimizer steps: gradients are zeroed, accumulated as declared, and clipped, and the
loss keeps its factor.

For a few steps after the start and after every save, hooks on one parameter per optimizer count the backward passes and see
whether the first of them began from no gradient; calls of `clip_grad_norm_` are noted, and the last operations of each loss
that `backward` gets. Outside these windows nothing is hooked.
"""

import contextlib
import functools
import math
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from chronicle.resume.compiled import is_compiling_here, outside_graphs, skip_in_graphs
from chronicle.resume.envelope.breach import Breach, BreachKind
from chronicle.resume.envelope.samples import DelayedReads, Snapshot
from chronicle.resume.faults import last_resort, raised_by_script, shield

FULL_LOOKS, FULL_TENSORS = 3, 512  # the first looks of an optimizer see every tensor, up to so many
TENSORS = 32  # per later look, in turn
BAD_LOOKS = 3  # in a row: a scaler inside an optimizer may skip two steps while it searches its scale
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
    idle: int = 0  # steps in a row in which no parameter had a gradient, and none that was looked at moved
    bad: int = 0  # looks in a row with gradients that are not finite
    bad_since: int | None = None  # the step of the first of them
    fine_at: int | None = None  # the last step with a gradient that was known to be finite
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
    idle: bool  # none of the optimizer's parameters has a gradient
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
            idle=all(p.grad is None for group in groups for p in group["params"]),
            before=Snapshot(params),
            gradients=Snapshot([g if _is_alike(p, g) else None for p, g in zip(params, gradients, strict=True)]),
        )

    def doubts(self, key: Any) -> bool:
        """Whether the last look at this optimizer found gradients that are not finite: the next step is looked at, too."""
        known = self._watched.get(key)
        return known is not None and known.bad > 0

    def was_fine(self, key: Any, step: int | None) -> None:
        """The gradient was finite at this step, as far as one element shows it."""
        known = self._watched.get(key)
        if known is not None and known.bad == 0:
            known.fine_at = step

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
        if not bad:
            known.bad = 0
            if look.step is not None:
                known.fine_at = max(look.step, known.fine_at or 0)
            return
        known.bad_since = look.step if known.bad == 0 else known.bad_since
        known.bad += 1
        if known.bad >= BAD_LOOKS:
            words = f"the gradient of `{bad[0]}` is NaN or infinite at the step, and no loss scaler skips it"
            since, fine = known.bad_since, known.fine_at
            low = fine if since is not None and fine is not None and fine < since else None
            self._tell(Breach(kind=BreachKind.GRADIENTS, step=since, words=words, seen=now, low=low))

    def _judge_motion(self, known: _Watched, look: _Look, moved: bool, should_move: bool, now: int | None) -> None:
        steps = 1 if now is None or look.step is None else max(1, now - look.step)
        known.idle = known.idle + steps if look.idle and not moved and not look.scaled and any(look.lrs) else 0
        if moved:
            known.still, known.still_since = 0, None
            return
        if known.idle >= STILL_STEPS and all(one.idle >= STILL_STEPS for one in self._watched.values()):
            words = f"no parameter has had a gradient in {known.idle} steps, and none moved: another model is trained, or none"
            self._tell(Breach(kind=BreachKind.STUCK, step=None if now is None else now - known.idle, words=words, seen=now))
            return
        if not should_move or look.scaled:
            return
        known.still_since = look.step if known.still == 0 else known.still_since
        known.still += steps
        if known.still >= STILL_STEPS:
            words = "the optimizer steps with gradients and an LR, but none of its parameters changes"
            self._tell(Breach(kind=BreachKind.STUCK, step=known.still_since, words=words, seen=now))


class EngineClipping:
    """Whether the gradients that an engine's inner optimizer steps with are as small as its configuration promises."""

    def __init__(self, tell: Callable[[Breach], object], later: DelayedReads) -> None:
        self._tell, self._later = tell, later
        self._limit, self._left = 0.0, WINDOW
        self._step: int | None = None

    def arm(self) -> None:
        """Look at the next steps."""
        self._left = WINDOW

    def engine_step(self, engine: Any, step: int | None) -> None:
        """A whole step of the engine begins."""
        limit = getattr(engine, "gradient_clipping", None)
        self._limit = float(limit() or 0.0) if self._left > 0 and callable(limit) else 0.0
        self._left, self._step = max(0, self._left - 1), step

    def inner_step(self, optimizer: Any) -> None:
        """Its own optimizer steps a part of the parameters, on one rank: no part may be larger than the whole."""
        import torch

        found = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        found = [own for own in (getattr(g, "_local_tensor", g) for g in found) if own.numel() and not own.is_sparse]
        limit, step = self._limit, self._step
        if limit <= 0.0 or not found or len({own.device for own in found}) > 1:
            return
        with torch.no_grad():
            norm = torch.stack([own.detach().float().norm() for own in found]).norm()
        snapshot = Snapshot([norm])
        self._later.add((snapshot,), lambda: self._judge(float(snapshot.rows()[0][0]), limit, step))

    def _judge(self, norm: float, limit: float, step: int | None) -> None:
        if math.isfinite(norm) and norm > limit * CLIP_SLACK:
            words = f"gradients are to be clipped to a norm of {limit:g}, and the optimizer steps with one of {norm:.4g}"
            self._tell(Breach(kind=BreachKind.CLIPPING, step=step, words=words, seen=step))


CLIP_SLACK = 1.05  # sums in half precision


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
        self.factors: list[LossFactor | None] = []  # of each interval


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
        self._losses: list[Sequence[tuple[str, Any]]] = []  # the last operations of each loss since the last step
        self._factor: LossFactor | None = None  # of the last window that had one
        self._twice = 0  # losses that were scaled twice

    @property
    def habit(self) -> str:
        """How the loss is divided, for a checkpoint; "" where it is not known."""
        return "" if self._factor is None else self._factor.to_habit()

    def expects(self, habits: Iterable[str]) -> None:
        """A state was loaded: its training divided the loss like this."""
        self._factor = next((one for one in map(LossFactor.of_habit, habits) if one is not None), None)

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
        self._losses = []
        _watch_clipping(self)
        _watch_backward()

    def before_step(self, optimizer: Any, step: int | None, declared: int | None) -> None:
        """An interval of this optimizer ends. `declared`: backward passes per step that the trainer announced."""
        self._judge_clips(step)
        if self._twice >= REPEATED:
            self._tell(Breach(kind=BreachKind.FACTOR, step=step, words=SCALED_TWICE, seen=step))
        window = self._windows.get(optimizer)
        if window is None:
            return
        window.intervals += 1
        last = window.intervals >= WINDOW
        losses, self._losses = self._losses, []
        window.factors.append(LossFactor.of(losses) if len(self._windows) == 1 else None)
        if last:
            self._judge_factor(window.factors, step)
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

    # ---- the factor of the loss ------------------------------------------------------------------------------------

    def backward(self, losses: Any) -> None:
        """`torch.autograd.backward` was called with these."""
        if len(self._windows) != 1 or len(self._losses) >= MOST_PASSES:
            return
        root = losses if hasattr(losses, "grad_fn") else losses[0] if len(losses) == 1 else None
        operations = last_operations(root)
        self._losses.append(operations)
        scales = [id_ for name, id_ in operations if name == "scale"]
        if len(set(scales)) < len(scales):
            self._twice += 1

    def _judge_factor(self, factors: Sequence["LossFactor | None"], step: int | None) -> None:
        """A window is over. Only where all of its steps were alike is anything known."""
        now = factors[0]
        if now is None or any(one != now for one in factors):
            return
        was, self._factor = self._factor, now
        if was is not None and (words := was.lost(now)):
            began = None if step is None else max(1, step - WINDOW)
            self._tell(Breach(kind=BreachKind.FACTOR, step=began, words=words, seen=step))

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


MOST_OPERATIONS, MOST_PASSES = 8, 256
SCALED_TWICE = "the loss is multiplied twice by the scale of its loss scaler"
HABIT = "loss-factor"


@dataclass(frozen=True, slots=True)
class LossFactor:
    """How the losses of one optimizer step were made: `times` divided by their number `passes`, as one of `operations`.

    A factor that is lost can not be told by the size of the gradient, which moves as much by itself. It is told by what the
    loss was made of, exactly: the last operations on it are known to autograd.
    """

    passes: int
    times: int
    operations: int

    @classmethod
    def of(cls, losses: Sequence[Sequence[tuple[str, Any]]]) -> "LossFactor | None":
        """That of one step; None where its losses were not made alike, or where there was a single one."""
        passes = len(losses)
        found = {(sum(_divides(one, passes) for one in loss), sum(value != 1 for _, value in loss)) for loss in losses}
        return cls(passes, *found.pop()) if 2 <= passes < MOST_PASSES and len(found) == 1 else None

    def lost(self, now: "LossFactor") -> str:
        """What became of the factor, "" for nothing. A batch of another size also changes numbers, but no operations."""
        if now.times == self.times or now.operations - self.operations != now.times - self.times:
            return ""
        times = ("is not divided", "is divided once", "is divided twice")
        say = [times[count] if count < len(times) else f"is divided {count} times" for count in (now.times, self.times)]
        return f"the loss {say[0]} by the number of micro-batches ({now.passes}); before, it {say[1].replace('is', 'was')}"

    def to_habit(self) -> str:
        """The stored form."""
        return f"{HABIT} {self.passes} {self.times} {self.operations}"

    @classmethod
    def of_habit(cls, text: str) -> "LossFactor | None":
        """Parse the stored form; None for another habit."""
        name, *numbers = text.split()
        return cls(*map(int, numbers)) if name == HABIT and len(numbers) == 3 and all(map(str.isdigit, numbers)) else None


def _divides(operation: tuple[str, Any], passes: int) -> bool:
    name, value = operation
    if not isinstance(value, (int, float)):
        return False
    return value == passes if name == "DivBackward0" else abs(value * passes - 1) < 1e-6


def last_operations(loss: Any) -> list[tuple[str, Any]]:
    """The numbers by which a loss was multiplied and divided last, newest first.

    Numbers on an accelerator are not read. ("scale", id) is a tensor that looks like the scale of a loss scaler.
    """
    found: list[tuple[str, Any]] = []
    node = getattr(loss, "grad_fn", None)
    while node is not None and len(found) < MOST_OPERATIONS:
        name = type(node).__name__
        if name == "ToCopyBackward0":  # to another precision
            node = node.next_functions[0][0]
            continue
        if name not in ("DivBackward0", "MulBackward0"):
            break
        inputs = [following for following, _ in node.next_functions if following is not None]
        if len(inputs) != 1:
            break
        other: Any = None
        with contextlib.suppress(RuntimeError, AttributeError):  # changed in place, or a graph that was used up
            other = node._saved_other if node.next_functions[0][0] is not None else node._saved_self
        if hasattr(other, "numel") and other.numel() == 1:
            value = other.item() if other.device.type == "cpu" else None
            is_scale = name == "MulBackward0" and value is not None and _is_scale(other, value)
            found.append(("scale", other.data_ptr()) if is_scale else (name, value))
        else:
            found.append((name, other if isinstance(other, (int, float)) else None))
        node = inputs[0]
    return found


def _is_scale(tensor: Any, value: float) -> bool:
    """As of a GradScaler: one number in float32, a power of two."""
    return str(tensor.dtype) == "torch.float32" and value >= 2 and math.frexp(value)[0] == 0.5


_original_backward: list[Any] = []


def _watch_backward() -> None:
    """Listen to `torch.autograd.backward`, which every `loss.backward()` ends in, as long as a window is open.

    Not where anything is compiled: the listener would be one frame more.
    """
    import torch

    if _original_backward or is_compiling_here(None):
        return
    inner = torch.autograd.backward
    _original_backward.append(inner)
    report = outside_graphs(shield(_report_backward, _lose_clipping))

    @functools.wraps(inner)
    def listening(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if _listeners:
            report(tensors)
        return inner(tensors, *args, **kwargs)

    torch.autograd.backward = skip_in_graphs(listening)


def _report_backward(tensors: Any) -> None:
    for listener in tuple(_listeners):
        try:
            listener.backward(tensors)
        except Exception as problem:
            if raised_by_script(problem):
                raise
            _listeners.discard(listener)
            last_resort(listener.lost, problem)


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
        if not _listeners:  # the last one was collected with its session
            return inner(parameters, max_norm, *args, **kwargs)
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
    if not _listeners and _original_backward:
        sys.modules["torch"].autograd.backward = _original_backward.pop()

"""Gradients and parameters over one optimizer step, by samples: do they move, are they finite.

A look takes samples before a step, and again before a later step of the same optimizer; both are judged when they are on the
host. A parameter must move only where an update of this LR and gradient is larger than the spacing of its numbers: low
precision, LR 0 and zero gradients are healthy. No torch call waits for the device.
"""

import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chronicle.resume.envelope.breach import BreachKind, BreachLog
from chronicle.resume.rules import listed
from chronicle.resume.samples import DelayedReads, Snapshot

FULL_LOOKS, FULL_TENSORS = 3, 512  # the first looks of an optimizer see every tensor, up to so many
TENSORS = 32  # per later look, in turn
BAD_LOOKS = 3  # in a row: a scaler inside an optimizer may skip two steps while it searches its scale
STILL_STEPS = 3  # without any movement, until it is told
SAFETY = 1e-2  # of an update lr * min(|g|, 1): optimizers scale it differently


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
    not_finite: frozenset[str] = frozenset()  # infinite from the beginning: masks kept as parameters


@dataclass(frozen=True, slots=True)
class _Look:
    step: int | None
    params: Sequence[Any]
    names: Sequence[str]
    lrs: Sequence[float]  # 0.0: not known
    scaled: bool  # a loss scaler works inside the step and may skip it
    idle: bool  # none of the optimizer's parameters has a gradient
    before: Snapshot
    gradients: Snapshot


class Motion:
    """The looks at every optimizer of a launch. `log` hears what is wrong."""

    def __init__(self, log: BreachLog, later: DelayedReads) -> None:
        self._log, self._later = log, later
        self._watched: weakref.WeakKeyDictionary[Any, _Watched] = weakref.WeakKeyDictionary()
        self.in_doubt = False  # gradients at the last look were not finite: the next step is looked at, too

    def close(self, key: Any, step: int | None, last: int | None) -> bool:
        """The look that is open for `key` ends: its next step is about to begin, or a save. False: none was open.

        `last`: the last step that was completed.
        """
        known = self._watched.get(key)
        look = known.open if known is not None else None
        if known is None or look is None:
            return False
        known.open = None
        after = Snapshot(look.params)
        self._later.add((look.before, look.gradients, after), lambda: self._judge(known, look, after, step, last))
        return True

    def close_all(self, step: int | None) -> None:
        """A save: judge what is open."""
        for key in list(self._watched):
            self.close(key, step, step)

    def open(self, key: Any, groups: Sequence[Mapping[str, Any]], names: Mapping[int, str], step: int | None) -> None:
        """Take samples before a step of `key`, an optimizer, or the engine that steps these groups."""
        known = self._watched.setdefault(key, _Watched())
        chosen = self._choose(known, [(p, lr_of(group)) for group in groups for p in group["params"]])
        if not chosen:
            return
        params = [p for p, _ in chosen]
        known.looks += 1
        known.open = _Look(
            step=step,
            params=params,
            names=[names.get(id(p), f"parameter of shape {tuple(p.shape)}") for p in params],
            lrs=[lr or 0.0 for _, lr in chosen],
            scaled=getattr(key, "grad_scale", None) is not None or getattr(key, "found_inf", None) is not None,
            idle=all(p.grad is None for group in groups for p in group["params"]),
            before=Snapshot(params),
            gradients=Snapshot([p.grad if _is_alike(p, p.grad) else None for p in params]),
        )

    def forget(self) -> None:
        """A state was loaded: samples from before it say nothing."""
        self._watched.clear()
        self.in_doubt = False

    def _choose(self, known: _Watched, every: list[tuple[Any, float | None]]) -> list[tuple[Any, float | None]]:
        every = [one for one in every if one[0].requires_grad]
        most = FULL_TENSORS if known.looks < FULL_LOOKS else TENSORS
        if len(every) <= most:
            return every
        begin = known.next % len(every)
        known.next = begin + most
        return (every[begin:] + every[:begin])[:most]

    def _judge(self, known: _Watched, look: _Look, after: Snapshot, now: int | None, last: int | None) -> None:
        import numpy as np

        moved = should_move = False
        poisoned, bad = [], []
        rows = zip(look.names, look.params, look.lrs, look.before.rows(), look.gradients.rows(), after.rows(), strict=True)
        for name, param, lr, old, gradient, new in rows:
            if old is None or new is None or len(old) != len(new):
                moved = True  # resized, or moved to another storage: not comparable
                continue
            was_finite = bool(np.isfinite(old).all())
            if np.isnan(new).any() or (was_finite and not np.isfinite(new).all()):
                poisoned.append((name, was_finite))
            changed = bool((old != new).any())
            moved = moved or changed
            if gradient is None or len(gradient) != len(old):
                continue
            size = np.abs(gradient)
            if not np.isfinite(size).all():
                bad.append(name)
            elif lr and not changed:
                update = lr * np.minimum(size, 1.0) * SAFETY
                should_move = should_move or bool((update > np.abs(old) * _spacing(param) + 1e-30).any())
        self._judge_values(known, look, poisoned, bad, last)
        self.in_doubt = any(one.bad for one in self._watched.values())
        self._judge_motion(known, look, moved, should_move, now)

    def _judge_values(
        self, known: _Watched, look: _Look, poisoned: list[tuple[str, bool]], bad: list[str], now: int | None
    ) -> None:
        if look.scaled:
            bad = []  # the scaler skips this step by itself
        if known.looks == 1 and not bad:
            known.not_finite = frozenset(name for name, was_finite in poisoned if not was_finite)
        poisoned = [one for one in poisoned if one[0] not in known.not_finite]
        if poisoned:
            cause = f"; the gradient of `{bad[0]}` was not finite" if bad else ""
            words = f"{listed([name for name, _ in poisoned], 1)} holds NaN or infinity{cause}"
            low = look.step - 1 if poisoned[0][1] and look.step is not None else None  # it was well when the look began
            self._log.tell(BreachKind.POISONED, words, step=now, low=low)
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
            self._log.tell(BreachKind.GRADIENTS, words, step=known.bad_since, low=known.fine_at, seen=now)

    def _judge_motion(self, known: _Watched, look: _Look, moved: bool, should_move: bool, now: int | None) -> None:
        steps = 1 if now is None or look.step is None else max(1, now - look.step)
        known.idle = known.idle + steps if look.idle and not moved and not look.scaled and any(look.lrs) else 0
        if moved:
            known.still, known.still_since = 0, None
            return
        if known.idle >= STILL_STEPS and all(one.idle >= STILL_STEPS for one in self._watched.values()):
            words = f"no parameter has had a gradient in {known.idle} steps, and none moved: another model is trained, or none"
            self._log.tell(BreachKind.STUCK, words, step=None if now is None else now - known.idle, seen=now)
            return
        if not should_move or look.scaled:
            return
        known.still_since = look.step if known.still == 0 else known.still_since
        known.still += steps
        if known.still >= STILL_STEPS:
            words = "the optimizer steps with gradients and an LR, but none of its parameters changes"
            self._log.tell(BreachKind.STUCK, words, step=known.still_since, seen=now)


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


def find_orphans(held: Sequence[Any], owned: set[int], names: Mapping[int, str], models: Sequence[Any]) -> str:
    """Why an optimizer of these parameters does not train the model, "" where it may.

    It holds parameters without a gradient that are no longer the model's, or none of its parameters has a gradient,
    while trainable parameters of the model have gradients and no optimizer (`owned`: ids) holds them.
    """
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
    what = "no longer belong to the model" if strange else "have no gradient"
    count = len(strange) or len(idle)
    return f"{count} of its {len(held)} parameters {what}, and no optimizer holds {listed(loose, 1)}, which has a gradient"

"""The warm-up of a rollback: the LR of the first steps after it, and the optimizer steps that are taken with it.

Only the step itself sees the lower LR: it is put in right before and the old value back right after, so that neither a
scheduler that multiplies the group's LR nor a checkpoint ever meets it.
"""

import functools
from collections.abc import Sequence
from typing import Any

__all__ = ["WarmUp", "can_warm_up", "warmed"]


def warmed(value: Any, step: int, warmups: Sequence[tuple[int, int]]) -> Any:
    """`value` as it is `step` steps into the run, under linear warm-ups of (first step, number of steps).

    The newest counts: one that began before it is given up.
    """
    for first, count in reversed(warmups):
        if first <= step:
            return value * (step - first + 1) / count if step < first + count else value
    return value


def can_warm_up(optimizers: Sequence[Any]) -> bool:
    """Whether every one has a step that can be seen to begin and to end, and LRs to lower meanwhile."""
    return bool(optimizers) and all(
        hasattr(one, "step") and all(group.get("lr") is not None for group in one.param_groups) for one in optimizers
    )


class WarmUp:
    """One optimizer whose coming steps are taken under `warmups`; `step`: how many it has completed."""

    def __init__(self, optimizer: Any, warmups: Sequence[tuple[int, int]], step: int) -> None:
        self._optimizer, self._warmups, self._step = optimizer, tuple(warmups), step
        self._kept: list[tuple[dict[str, Any], Any]] = []  # groups and what their LR was, during a step
        self.used: float | None = None  # LR of the first group in the last step; None where that was the scheduler's own
        if hasattr(optimizer, "register_step_pre_hook"):
            optimizer.register_step_pre_hook(lambda *_: self._lower())
            optimizer.register_step_post_hook(lambda *_: self._finish())
        else:
            optimizer.step = self._around(optimizer.step)  # ZeRO's: it steps the one inside group by group

    def restore(self) -> None:
        """Put back what a step that raised has left behind."""
        while self._kept:
            group, lr = self._kept.pop()
            if hasattr(group["lr"], "copy_"):
                group["lr"].copy_(lr)
            else:
                group["lr"] = lr

    def _lower(self) -> None:
        self.restore()
        self.used = None
        if not any(first <= self._step < first + count for first, count in self._warmups):
            return
        done: set[int] = set()  # groups may share one tensor
        for group in self._optimizer.param_groups:
            lr = group["lr"]
            if not hasattr(lr, "copy_"):
                self._kept.append((group, lr))
                group["lr"] = warmed(lr, self._step, self._warmups)
            elif id(lr) not in done:
                done.add(id(lr))
                self._kept.append((group, lr.clone()))
                lr.copy_(warmed(lr, self._step, self._warmups))
        self.used = float(self._optimizer.param_groups[0]["lr"])

    def _finish(self) -> None:
        self.restore()
        self._step += 1

    def _around(self, original: Any) -> Any:
        @functools.wraps(original)
        def step(*args: Any, **kwargs: Any) -> Any:
            self._lower()
            try:
                return original(*args, **kwargs)
            finally:
                self._finish()

        return step

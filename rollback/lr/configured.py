"""LRs that follow from recorded arguments: what transformers' schedules and DeepSpeed's own schedulers have in common.

The formulas are in `lr.transformers` and `lr.deepspeed`. They are true only as long as the next launch is given the same
arguments, every answer is labelled so, and one that does not reproduce the saved LR is not given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollback.lr.oracle import LrTable, Unknown

_TOLERANCE = 1e-9


def table(
    lrs: Callable[[int], list[float]], step: int, groups: Sequence[Mapping[str, Any]], k: int, who: str
) -> LrTable | Unknown:
    """`k` rows from the counter `step` on, the first being the LRs that the groups hold."""
    held = [group.get("lr") for group in groups]
    try:
        given = lrs(step)
        if len(given) != len(held) or not all(_same(x, lr) for x, lr in zip(given, held, strict=True)):
            return Unknown(f"{who} as recorded would be at {given}, the checkpoint holds {held}: other arguments")
        return (
            tuple(float(lr) for lr in held if isinstance(lr, int | float)),
            *(tuple(lrs(step + i)) for i in range(1, k)),
        )
    except (TypeError, ValueError, ZeroDivisionError, OverflowError) as problem:
        return Unknown(f"{who} has arguments that cannot be computed with ({type(problem).__name__}: {problem})")


def _same(given: float, held: object) -> bool:
    return isinstance(held, int | float) and math.isclose(given, held, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE * 1e-6)

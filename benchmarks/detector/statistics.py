"""Counts with honest intervals; no dependency."""

from __future__ import annotations

import math
from collections.abc import Sequence

Z_95 = 1.959964


def wilson(hits: int, total: int) -> tuple[float, float]:
    """Return the 95 % Wilson score interval of a share (Wilson 1927); (0, 1) when nothing was counted."""
    if total == 0:
        return 0.0, 1.0
    share, square = hits / total, Z_95 * Z_95
    centre = share + square / (2 * total)
    reach = Z_95 * math.sqrt(share * (1 - share) / total + square / (4 * total * total))
    scale = 1 + square / total
    return max(0.0, (centre - reach) / scale), min(1.0, (centre + reach) / scale)


def quantile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that `share` of them do not exceed; None of nothing."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


def format_share(hits: int, total: int) -> str:
    """`29/51 .57 [.43-.70]`."""
    if total == 0:
        return "0/0"
    low, high = wilson(hits, total)
    return f"{hits}/{total} {hits / total:.2f} [{low:.2f}-{high:.2f}]"

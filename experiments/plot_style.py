"""What the pictures of a study share: a colour for each arm, the arms that are compared, the words of the x axis."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.outcomes import StudyData

__all__ = ["UPDATES", "as_text", "colour_of", "compared"]

COLOURS = ("#7f7f7f", "#000000", "#009e73", "#d55e00", "#cc79a7", "#0072b2", "#e69f00", "#56b4e9", "#8c564b", "#66a61e")
UPDATES = "updates after the common checkpoint"


def compared(data: StudyData) -> Iterator[str]:
    """Arms but for the exact restart, which is the reference."""
    yield from (arm for arm in data.arms if arm not in data.plan.study.gate[1:])


def colour_of(data: StudyData, arm: str) -> str:
    names = [one.name for one in data.plan.study.arms]
    return COLOURS[names.index(arm) % len(COLOURS)]


def as_text(value: float) -> str:
    return f"{value:.6g}"

"""The benchmark of causes that the guard was not written for can be played: a healthy resume passes, a planted one does not."""

from pathlib import Path

import pytest

from benchmarks.strange_causes.__main__ import Outcome, play
from benchmarks.strange_causes.causes import CAUSES, HEALTHY, Cause


def chosen(causes: list[Cause], form: str, name: str) -> Cause:
    return next(cause for cause in causes if cause.form == form and cause.name.startswith(name))


@pytest.mark.parametrize("form", ["torch", "accelerate"])
def test_another_loss_is_stopped_and_its_healthy_twin_passes(form: str, tmp_path: Path) -> None:
    """The loss is outside the model: only the first gradient shows it."""
    assert play(chosen(HEALTHY, form, "nothing"), tmp_path / "healthy") == (Outcome.SILENT, "")
    outcome, words = play(chosen(CAUSES, form, "classes weighted"), tmp_path / "wrong")
    assert (outcome, words.startswith("M6 gradient")) == (Outcome.BEFORE, True)


@pytest.mark.slow
@pytest.mark.parametrize("cause", HEALTHY, ids=lambda cause: f"{cause.form} {cause.name}")
def test_healthy_twin_is_not_stopped(cause: Cause, tmp_path: Path) -> None:
    assert play(cause, tmp_path)[0] in (Outcome.SILENT, Outcome.NAMED)

"""The text of a study in windows of whole bytes, without torch: for the trainer, and for the report's recount."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from bit_transformer.data.corpora import Corpus, read_corpus
from bit_transformer.errors import TrainerError
from chronicle.data.errors import DataError
from experiments.design import StudyPlan
from experiments.errors import NoData
from experiments.order import DataShape, Ids

__all__ = ["Windows", "cut_windows", "read_shape", "spread"]

Windows: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"


def cut_windows(text: bytes, window_bytes: int, name: str) -> Windows:
    """Consecutive windows (N, window_bytes); the incomplete last one is left out. Raises `NoData` where there is none."""
    number = len(text) // window_bytes
    if not number:
        raise NoData(f"source `{name}` has {len(text)} bytes, fewer than one window of {window_bytes}")
    return np.frombuffer(text, dtype=np.uint8)[: number * window_bytes].reshape(number, window_bytes)


def read_shape(plan: StudyPlan) -> tuple[DataShape, tuple[Corpus, ...]]:
    """The corpora of the study, and how many windows each holds."""
    corpora = tuple(_read(name) for name in plan.sources)
    return DataShape(
        sources=plan.sources,
        num_windows=tuple(len(corpus.train) // plan.profile.window_bytes for corpus in corpora),
        profile=plan.profile,
        num_slices=len(plan.study.arms[0].slices),
    ), corpora


def _read(name: str) -> Corpus:
    try:
        return read_corpus(name)
    except (DataError, TrainerError) as problem:
        raise NoData(str(problem), problem.remedy) from problem


def spread(number: int, count: int) -> Ids:
    """At most `count` numbers below `number`, evenly spaced."""
    return np.linspace(0, number - 1, min(count, number)).astype(np.int64)

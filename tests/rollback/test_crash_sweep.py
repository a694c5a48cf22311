"""A sample of `make crash-sweep`: the real commands, killed and failed from outside at their system calls."""

from __future__ import annotations

import shutil

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.sample,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("strace") is None, reason="strace injects the faults; without it see test_crash_points"),
]


def test_sample_of_points_shows_before_or_after_and_recovers() -> None:
    from benchmarks.crash_sweep import sweep

    said: list[str] = []
    assert sweep(every=160, say=said.append) == []
    assert int(said[-1].split()[0]) >= 12, said

"""Detect incidents in a training log: spikes, divergences, NaN, wrong learning rates, lost weights.

`Detector` folds logged points, live or after the fact, into `Event`s with an onset, a lower bound for it, a kind and
a tier. Standard library only; no clock, no disk. What to do about an event: `rollback.propose`.
"""

from rollback.detect.engine import Detector
from rollback.detect.events import Event, Kind, Status, Tier

__all__ = ["Detector", "Event", "Kind", "Status", "Tier"]

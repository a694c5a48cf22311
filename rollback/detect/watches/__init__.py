"""Watches of single signals beside the two rules of a series: each keeps a few numbers and returns a finding, or None."""

from __future__ import annotations

from dataclasses import dataclass

from rollback.detect.events import Kind, Status, Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that begins, or with `ends` is over; `row` and `step` are where it began.

    `status` is that of the event: what is over when it is found is recovered. `expected` is an LR that was promised.
    """

    kind: Kind
    sentence: str
    row: int
    step: int
    low_step: int | None = None  # the earliest step at which it may have begun, where that is not `step`
    tier: Tier = Tier.NOTICE
    status: Status = Status.OPEN
    ends: bool = False
    expected: float | None = None
    excess: float | None = None
    sigmas: float | None = None

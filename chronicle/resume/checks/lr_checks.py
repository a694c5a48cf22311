"""M2: learning rates now, in the next steps, and as far as the schedule's own functions reach. Pure."""

from collections.abc import Iterator

from chronicle.resume.checks.comparing import SAME, other_world, show
from chronicle.resume.contract import COMPUTED, Expectation, close_rows
from chronicle.resume.learning_rate import far_points
from chronicle.resume.checks.likely_causes import forecast_cause, lr_cause
from chronicle.resume.memory import Memory
from chronicle.resume.checks.check import Check, failed

__all__ = ["further_checks", "lr_checks", "warm_up_checks"]

SIX_DIGITS = 2e-5  # relative: as values further on are recorded


def lr_checks(expected: Expectation, found: Memory, by_hand: bool) -> Iterator[Check]:
    tolerance = SAME if expected.contract is None else COMPUTED
    lrs = expected.lrs()
    own = tuple(group.lr for group in found.groups)
    if lrs is not None:
        ok = close_rows((lrs,), (own,), expected.allowed_jump() - 1 if by_hand else tolerance)
        yield Check(
            name="learning rate per group",
            code="M1",
            ok=ok,
            expected=show(lrs),
            found=show(own) or "no optimizer",
            where="optimizer param_groups",
            cause="" if ok else lr_cause(expected, found, lrs, own),
        )
    rows = expected.next_lrs()
    if rows is None or found.next_lrs is None or by_hand or other_world(expected, found):
        return
    count = min(len(rows), len(found.next_lrs))
    bad = next((i for i in range(count) if not close_rows((rows[i],), (found.next_lrs[i],), tolerance)), None)
    yield Check(
        name="learning rates of the next steps",
        code="M2",
        ok=bad is None,
        expected=f"step +{bad + 1}: {show(rows[bad])}" if bad is not None else f"{count} steps",
        found=f"step +{bad + 1}: {show(found.next_lrs[bad])}" if bad is not None else "equal",
        where="scheduler and optimizer, stepped on copies",
        cause="" if bad is None else forecast_cause(expected, found),
    )


def warm_up_checks(expected: Expectation, found: Memory) -> Iterator[Check]:
    """The first LR of a new warm-up is the trainer's choice, but not above the LR it warms up to."""
    lrs, own = expected.lrs(), tuple(group.lr for group in found.groups)
    if lrs is None:
        return
    ok = len(own) == len(lrs) and all(0 <= a <= b * (1 + COMPUTED) for a, b in zip(own, lrs, strict=False))
    cause = "" if ok else "the trainer did not carry out the warm-up of the rollback"
    yield Check(
        name="learning rate of the warm-up",
        code="M2",
        ok=ok,
        expected=f"at most {show(lrs)}",
        found=show(own),
        where="optimizer param_groups",
        cause=cause,
    )


def further_checks(expected: Expectation, found: Memory) -> Iterator[Check]:
    """The schedule beyond the forecast: an end or a decay that was moved acts only when it is reached."""
    memory = expected.memory
    if memory is None or expected.contract is not None or other_world(expected, found):
        return
    if expected.accepts("schedule"):
        return
    for index, (saved, own) in enumerate(zip(memory.schedulers, found.schedulers, strict=False)):
        if saved.name != own.name or len(saved.further) != len(own.further):
            continue
        for points, own_points in zip(saved.further, own.further, strict=True):
            bad = next((i for i, (a, b) in enumerate(zip(points, own_points, strict=False)) if _differ(a, b)), None)
            if bad is None:
                continue
            step = list(far_points())[bad]
            yield failed(
                "schedule further on",
                "M2",
                expected=f"step +{step}: {points[bad]:.6g}",
                found=f"step +{step}: {own_points[bad]:.6g}",
                where=f"function of scheduler {index} ({own.name})",
                cause="same LR for now, another one later: the schedule was built with another length; "
                'if that is meant, accept "schedule: why"',
            )
            break


def _differ(a: float, b: float) -> bool:
    return abs(a - b) > SIX_DIGITS * max(abs(a), abs(b))

"""From a mismatch to the sentence a person needs: which of the known accidents looks like this. Pure.

The signatures come from the catalogue of silent resume failures; where none fits, the sentence says only what is known.
"""

from collections.abc import Mapping, Sequence

from chronicle.resume.contract import COMPUTED, Expectation, close_rows
from chronicle.resume.memory import Memory, Scheduler

__all__ = [
    "forecast_cause",
    "lr_cause",
    "moment_cause",
    "moments_cause",
    "position_cause",
    "rng_cause",
    "step_cause",
    "weights_cause",
]


def lr_cause(expected: Expectation, found: Memory, lrs: Sequence[float], own: Sequence[float]) -> str:
    if not own:
        return "no optimizer is known to the guard: load after prepare()"
    if len(own) != len(lrs):
        return "the number of parameter groups changed"
    restarted = restarted_scheduler(expected.memory, found.schedulers)
    if restarted:
        return restarted
    contract = expected.contract
    ratio = contract.lr_ratio if contract is not None else None
    if contract is not None and ratio and close_rows((tuple(lr * ratio for lr in own),), (tuple(lrs),), COMPUTED):
        return f"the LR of rollback {contract.rollback} did not reach memory: the script set the old one again"
    if all(lr == 0 for lr in own):
        return "LR is zero: the warm-up starts again"
    return "the optimizer's groups were not restored, or something set their LR after the load"


def forecast_cause(expected: Expectation, found: Memory) -> str:
    restarted = restarted_scheduler(expected.memory, found.schedulers)
    if restarted:
        return restarted
    if expected.memory and [s.unit for s in expected.memory.schedulers] != [s.unit for s in found.schedulers]:
        return "the scheduler advances at another speed: the number of processes changed"
    return "the schedule has another shape than at save: other arguments (warm-up, horizon), class, or bound optimizer"


def restarted_scheduler(memory: Memory | None, schedulers: Sequence[Scheduler]) -> str:
    saved = memory.schedulers if memory else ()
    if saved and not schedulers:
        return "the scheduler is not prepared or registered in this launch: its saved state was not loaded"
    for index, own in enumerate(schedulers):
        if own.last_epoch == 0 and (index >= len(saved) or saved[index].last_epoch):
            return (
                f"scheduler {index} ({own.name}) was not restored: it stands at its beginning and would warm up again"
            )
    return ""


def position_cause(saved: Scheduler, own: Scheduler) -> str:
    if not own.last_epoch:
        return "the scheduler was not restored: it stands at its beginning"
    if not saved.last_epoch:
        return "the scheduler was stepped during the load"
    for factor in (2, 3, 4, 8, 16):
        if own.last_epoch in (saved.last_epoch * factor, saved.last_epoch // factor):
            return f"off by a factor of {factor}: stepped twice, or counted in another number of processes"
    if abs(own.last_epoch - saved.last_epoch) <= saved.unit:
        return "stepped once too often or too seldom around the save or the load"
    return "state of another step was loaded"


def step_cause(memory: Memory, found: Memory) -> str:
    if not found.step:
        return "the step counter was not restored: training would start from zero"
    return "state of another step was loaded, or the counter is not in optimizer steps"


def moment_cause(norm: float | None) -> str:
    if norm is None or norm == 0:
        return "the optimizer state was not restored: its moments are empty"
    return "moments of another step, or of other parameters"


def weights_cause(memory: Memory, own: str) -> str:
    for name, digest in memory.averages.items():
        if own and digest == own:
            return f"these are the averaged weights `{name}`, not the weights that were trained"
    return "the model was not restored, or changed after the load"


def moments_cause(memory: Memory, own: str, rank: int) -> str:
    for digest in memory.ranks:
        if digest.rank != rank and own and digest.moments == own:
            return f"this rank holds the optimizer shard of rank {digest.rank}"
    return "the optimizer state was not restored, or belongs to other parameters"


def rng_cause(memory: Memory, own: Mapping[str, str], rank: int) -> str:
    for digest in memory.ranks:
        if digest.rank != rank and digest.rng.get("torch") == own.get("torch"):
            return f"this rank holds the generators of rank {digest.rank}"
    return "the random state was not restored: its file is missing, unreadable or of another world size, skipped in silence"

"""Checks F4 to F8: whether the numbers in a checkpoint agree with each other. Pure functions of its state.

A difference that a healthy run can have (fp16 skipped steps, schedulers stepped once per epoch, an offset of one
between a name and Adam's counter) is reported as WARN or INFO.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from rollback.checkpoint.account import Reading
from rollback.checkpoint.state import CheckpointState, OptimizerState, SchedulerState, last_epoch_of
from rollback.errors import GO_BACK, WRONG_FILE, Finding, Severity
from rollback.lr.effect import agrees
from rollback.lr.rules import FOREIGN, infer_scheduler_class

LR_TOLERANCE = 1e-6  # relative: float32 tensors hold seven digits


def check_state(state: CheckpointState) -> list[Finding]:
    """The findings of F4 to F8, in this order."""
    return [
        *state.findings,
        *check_steps(state),
        *check_schedulers(state),
        *check_lrs(state),
        *check_optimizers(state),
        *check_random_states(state),
        *check_data(state),
        *check_account(state),
    ]


def check_steps(state: CheckpointState) -> Iterator[Finding]:
    """F4: all parameters and ranks have the same optimizer step, and it is the step in the name."""
    by_file = {o.file: o.steps for o in state.optimizers if o.steps}
    newest = {file: steps[1] for file, steps in by_file.items()}
    if len(set(newest.values())) > 1 and _are_parts(state.optimizers):
        usual = max(set(newest.values()), key=list(newest.values()).count)
        for file, step in newest.items():
            if step != usual:
                yield Finding("F4", Severity.ERROR, file, f"its optimizer is at step {step}, the others at {usual}: "
                               "it belongs to another checkpoint", WRONG_FILE)  # fmt: skip
    for file, (low, high) in by_file.items():
        if low != high:
            yield Finding("F4", Severity.INFO, file, f"parameters were updated between {low} and {high} times: "
                           "some had no gradient at some steps")  # fmt: skip
    named, counted = state.checkpoint.step, state.optimizer_step
    if named is not None and counted is not None and not _counts(named, _steps_of_each(state.optimizers) or [counted]):
        yield Finding(
            "F4",
            Severity.WARN,
            ".",
            f"step {named} by its {state.checkpoint.step_source}, but the optimizer has made {counted} steps",
            "compare with other checkpoints: a constant offset is normal, any other means a wrong file or a new optimizer",
        )
    counters = [(k, v) for k, v in state.counters.items() if k.rpartition(":")[2] in ("global_step", "global_steps")]
    for name, value in counters:
        if named is None or value == named:
            continue
        if state.checkpoint.step_source == "counters":  # a script's own counter: what it counts is unknown
            yield Finding("F4", Severity.INFO, name.partition(":")[0], f"{name.rpartition(':')[2]} is {_short(value)}, "
                           f"the optimizer has made {named} steps: not compared, the script may count otherwise")  # fmt: skip
        else:
            yield Finding("F4", Severity.ERROR, name.partition(":")[0], f"{name.rpartition(':')[2]} is {_short(value)}, "
                           f"the checkpoint has step {named}", WRONG_FILE)  # fmt: skip


def _steps_of_each(optimizers: Sequence[OptimizerState]) -> list[int]:
    """The steps of each optimizer; shards of one optimizer count once."""
    whole = [o.steps[1] for o in optimizers if o.steps and o.rank is None]
    shards = [o.steps[1] for o in optimizers if o.steps and o.rank is not None]
    return [*whole, *([max(shards)] if shards else [])]


def _counts(named: int, steps: Sequence[int]) -> bool:
    """Whether a name counts these steps, give or take one: of one of the optimizers, or of all together (Lightning)."""
    return any(abs(named - step) <= 1 for step in steps) or abs(named - sum(steps)) <= len(steps)


def _are_parts(optimizers: Sequence[OptimizerState]) -> bool:
    """Whether the files are rank shards of one optimizer; two optimizers of a GAN may differ."""
    return all(o.rank is not None for o in optimizers)


def check_schedulers(state: CheckpointState) -> Iterator[Finding]:
    """F4: schedulers agree with the optimizer's step and with each other."""
    for scheduler in state.schedulers:
        yield from _scheduler_position(scheduler, state)
    yield from _scheduler_disagreements(state.schedulers)


def _scheduler_position(scheduler: SchedulerState, state: CheckpointState) -> Iterator[Finding]:
    last_epoch, step = last_epoch_of(scheduler.state), state.optimizer_step
    if last_epoch is None and infer_scheduler_class(scheduler.state) in (None, *FOREIGN):
        return  # not torch's: it counts by a name of its own, or its caller tells it the step
    if last_epoch is None:
        yield Finding("F4", Severity.WARN, scheduler.file, "the scheduler state has no counter: it restarts at 0",
                       "check that this run wrote the file")  # fmt: skip
        return
    count = scheduler.state.get("_step_count")
    if isinstance(count, int) and count != last_epoch + 1:
        yield Finding("F4", Severity.INFO, scheduler.file, f"_step_count is {count}, last_epoch {last_epoch}: "
                       "usually one apart")  # fmt: skip
    if step is None or not scheduler.authoritative or "last_batch_iteration" in scheduler.state:
        return
    unit = state.scheduler_unit or 1
    expected = step * unit
    if state.scheduler_unit is not None or abs(last_epoch - expected) <= unit:
        return
    behind = last_epoch < expected
    why = "fp16 skips steps, and some trainers step the schedule once per epoch" if behind else (
        "it went through `accelerator.prepare` with another number of processes, or micro-steps were counted")  # fmt: skip
    if behind and last_epoch < expected // 2:
        why += "; a schedule that restarted from zero also looks like this"
    message = f"last_epoch is {last_epoch} but the optimizer made {step} steps (expected {unit} per step): {why}"
    yield Finding("F4", Severity.WARN, scheduler.file, message, "compare with an earlier one: `chronicle inspect A B`")


def _scheduler_disagreements(schedulers: Sequence[SchedulerState]) -> Iterator[Finding]:
    """Copies of one scheduler must agree: those of the ranks, and an overridden copy."""
    for index, one in enumerate(schedulers):
        for other in schedulers[index + 1 :]:
            if one.state.keys() != other.state.keys() or (
                one.authoritative and other.authoritative and one.rank is None
            ):
                continue
            for field in ("last_epoch", "last_batch_iteration", "base_lrs", "_last_lr"):
                if _differ(one.state.get(field), other.state.get(field)):
                    yield Finding(
                        "F4",
                        Severity.ERROR,
                        other.file,
                        f"two schedulers disagree: {field} is {_short(other.state.get(field))} here, "
                        f"{_short(one.state.get(field))} in `{one.file}`",
                        "edit both to the same values, or " + GO_BACK,
                    )
                    return


def check_lrs(state: CheckpointState) -> Iterator[Finding]:
    """F5: the scheduler's last LRs are the LRs of the optimizer's groups, on every rank."""
    for optimizer in state.optimizers:
        for index, group in enumerate(optimizer.groups):
            lr = group.get("lr")
            if isinstance(lr, (int, float)) and (not math.isfinite(lr) or lr < 0):
                yield Finding("F5", Severity.ERROR, optimizer.file, f"group {index} has lr {lr!r}", GO_BACK)
    yield from _ranks_agree(state.optimizers)
    owners = [s for s in state.schedulers if s.authoritative and s.rank in (None, 0)]
    optimizers = [o for o in state.optimizers if o.rank in (None, 0) and o.groups]
    if len(optimizers) == 1:
        pairs = [(scheduler, optimizers[0]) for scheduler in owners]
    elif len(optimizers) == len(owners):
        pairs = list(zip(owners, optimizers, strict=True))
    else:
        return  # which scheduler drives which optimizer is not stored
    for scheduler, optimizer in pairs:
        lrs = [group.get("lr") for group in optimizer.groups]
        others = [one for one, its in pairs if its is optimizer and one is not scheduler]
        if not any(agrees(one.state, lrs) for one in others):  # else that one was stepped after it, or in its turn
            yield from _compare_lrs(scheduler, optimizer)


def _compare_lrs(scheduler: SchedulerState, optimizer: OptimizerState) -> Iterator[Finding]:
    for field, key in (("_last_lr", "lr"), ("base_lrs", "initial_lr")):
        stored = scheduler.state.get(field)
        if not isinstance(stored, (list, tuple)):
            continue
        known = [group for group in optimizer.groups if "initial_lr" in group]
        if len(stored) == len(known) < len(optimizer.groups) and known == list(optimizer.groups[: len(known)]):
            continue  # the other groups were added after the scheduler was made (a backbone that is thawed)
        if len(stored) != len(optimizer.groups):
            yield Finding("F5", Severity.ERROR, scheduler.file, f"{field} has {len(stored)} values, `{optimizer.file}` "
                           f"{len(optimizer.groups)} groups", WRONG_FILE)  # fmt: skip
            return
        for index, (value, group) in enumerate(zip(stored, optimizer.groups, strict=True)):
            if key in group and _differ(value, group[key]):
                yield Finding(
                    "F5",
                    Severity.WARN,
                    scheduler.file,
                    f"{field}[{index}] is {value!r}, but group {index} of `{optimizer.file}` has {key} {group[key]!r}: "
                    "only one of them was edited",
                    "let `chronicle rollback --lr-scale` edit every place at once",
                )


def _ranks_agree(optimizers: Sequence[OptimizerState]) -> Iterator[Finding]:
    parts = [o for o in optimizers if o.rank is not None]
    for part in parts[1:]:
        for index, (group, first) in enumerate(zip(part.groups, parts[0].groups, strict=False)):
            if _differ(group.get("lr"), first.get("lr")):
                yield Finding(
                    "F5",
                    Severity.ERROR,
                    part.file,
                    f"rank {part.rank} has lr {group.get('lr')!r} in group {index}, rank {parts[0].rank} "
                    f"{first.get('lr')!r}: each rank loads its own file",
                    "let `chronicle rollback --lr-scale` edit every rank at once",
                )


def check_optimizers(state: CheckpointState) -> Iterator[Finding]:
    """F6: an optimizer that made steps has state for its parameters."""
    for optimizer in state.optimizers:
        if not optimizer.num_states and optimizer.groups and not _keeps_none(optimizer):
            yield Finding(
                "F6",
                Severity.ERROR,
                optimizer.file,
                "no parameter has optimizer state: moments and step counters would start from zero",
                GO_BACK,
            )
        listed = [group["params"] for group in optimizer.groups if isinstance(group.get("params"), list)]
        params = sum(len(names) for names in listed if isinstance(names, list))
        if optimizer.rank is None and 0 < optimizer.num_states < params:
            yield Finding("F6", Severity.INFO, optimizer.file, f"{optimizer.num_states} of {params} parameters have "
                           "state: the others are frozen or never had a gradient")  # fmt: skip
    if state.unread:
        yield Finding("F6", Severity.INFO, ".", f"{state.unread} not read: nothing is known of the optimizer's state")
    elif not state.optimizers:
        yield Finding("F6", Severity.WARN, ".", "no optimizer state was found: moments would start from zero", GO_BACK)


def _keeps_none(optimizer: OptimizerState) -> bool:
    """Whether this is SGD without momentum, which has no state. RMSprop's momentum may be 0 too: it has no `nesterov`."""
    return all("nesterov" in group and group.get("momentum") == 0 for group in optimizer.groups)


def check_random_states(state: CheckpointState) -> Iterator[Finding]:
    """F7: each rank has a random state of its own."""
    # The Trainer gives every rank the same seed, so equal states are normal until one rank draws more numbers
    severity = Severity.INFO if state.checkpoint.format == "transformers" else Severity.WARN
    seen: dict[str, int] = {}
    for rank, digest in state.rng_digests.items():
        if digest in seen:
            yield Finding("F7", severity, ".", f"ranks {seen[digest]} and {rank} have the same random state: "
                           "the state of one rank was saved for all",
                           "this is right only if all ranks share one seed")  # fmt: skip
        seen.setdefault(digest, rank)
    recorded = state.topology.get("world_size")
    if state.rng_ranks and isinstance(recorded, int) and len(state.rng_ranks) != recorded:
        yield Finding("F7", Severity.WARN, ".", f"random states of {len(state.rng_ranks)} ranks: expected {recorded}; "
                       "the other ranks start new ones")  # fmt: skip


def check_data(state: CheckpointState) -> Iterator[Finding]:
    """F8: the checkpoint stores a data position."""
    if not state.data and not state.unread:
        yield Finding(
            "F8",
            Severity.INFO,
            ".",
            "no data position is stored: the resumed run reads its data from the start unless the script skips batches",
        )


def check_account(state: CheckpointState) -> Iterator[Finding]:
    """F6: what was not read, each by name; state among it is a warning."""
    for one in state.account:
        if one.reading is Reading.UNREAD and not state.unread:
            severity = Severity.WARN if one.doubtful else Severity.INFO
            yield Finding("F6", severity, one.path, f"{one.sentence()} ({one.size_bytes} bytes)")


def _differ(one: object, other: object) -> bool:
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) != len(other) or any(_differ(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return not math.isclose(one, other, rel_tol=LR_TOLERANCE, abs_tol=1e-30)
    if isinstance(one, Mapping) or isinstance(other, Mapping):
        return False
    return type(one) is type(other) and one != other


def _short(value: object) -> str:
    if isinstance(value, (list, tuple)) and len(value) > 3:
        return f"[{value[0]}, {value[1]}, … {len(value)} values]"
    return str(value)

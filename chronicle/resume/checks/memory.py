"""Memory compared with the expectation: step, optimizer, schedulers, learning rates, topology, weights, generators. Pure.

What each value is and what may have gone wrong is a row of `rules.py`. A value that was not recorded at save is not compared.
Checks that passed are returned too, so that the verdict in the journal says what was compared.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from chronicle.resume.checks.check import Check, attempt, compared, not_compared, noted
from chronicle.resume.contract import COMPUTED, SMALL_JUMP, Expectation, close_rows
from chronicle.resume.learning_rate import far_points
from chronicle.resume.memory import Memory, ParamGroup, RankDigest, Scheduler
from chronicle.resume.moving import MOVES, OBJECT, LoadedState, check_buffers
from chronicle.resume.rules import RULES, SAME, judge, show_row

PARTS = {  # of a description, as a person knows them
    "groups": "parameter groups",
    "lr": "learning rate per group",
    "optimizer_steps": "optimizer step",
    "next_lrs": "learning rates of the next steps",
    "scaler": "loss scaler",
    "order": "order of the parameters",
    "frozen": "frozen parameters",
    "data": "data position",
    "rng": "random generators",
    "moments": "optimizer moments",
}
OF_LR = ("learning rate per group", "learning rate of the warm-up")
NUMBERS = ("weight_decay", "initial_lr", "max_lr", "min_lr")  # options with a field of their own, None where a group has none
SIX_DIGITS = 2e-5  # relative: precision in which the far end of a schedule is recorded
SPLIT = ("batch_size", "micro_batch", "accumulation")  # how the samples of a step are split on one rank
RANKS = ("world_size", "num_processes", "sharding")
REPLICATED = (None, "replicated", "SingleDeviceStrategy", "DDPStrategy")  # every rank holds the whole state


def check_memory(expected: Expectation, found: Memory, *, rank: int = 0, at_first_step: bool = False) -> list[Check]:
    """Every comparison that must hold after the load and again right before the first step.

    Between the two a script may set its LR itself, and a trainer that applies a rollback's warm-up begins it.
    """
    unknown = list(_unknown_parts(expected, found))
    checks, memory = list[Check](), expected.memory
    if at_first_step and expected.warms_up:
        checks += attempt("warm-up of the rollback", "M2", lambda: _warm_up_checks(expected, found))
    else:
        by_hand = at_first_step and expected.lr_set_by_hand
        checks += attempt("learning rates", "M2", lambda: _lr_checks(expected, found, by_hand))
        checks += attempt("schedule further on", "M2", lambda: () if by_hand else further_checks(expected, found))
    if memory is None:
        checks += attempt("contract", "M1", lambda: _contract_only_checks(expected, found))
        return [*unknown, *_of_known_parts(checks, found.unknown)]
    checks += attempt("step", "M1", lambda: _step_checks(expected, memory, found))
    checks += attempt("schedulers", "M1", lambda: _scheduler_checks(expected, memory, found))
    checks += attempt("topology", "M3", lambda: _topology_checks(expected, memory, found))
    checks += attempt("scaler and averages", "M1", lambda: _extra_checks(expected, memory, found))
    # sizes and norms in the manifest are those of the main process: of a sharded optimizer they describe its shard alone
    if rank == 0 or not is_sharded(memory):
        checks += attempt("optimizer", "M1", lambda: _optimizer_checks(expected, memory, found))
    checks += attempt("weights and moments", "M1", lambda: _digest_checks(expected, memory, found, rank))
    return [*unknown, *_of_known_parts(checks, {**memory.unknown, **found.unknown})]


def _of_known_parts(checks: Sequence[Check], unknown: Collection[str]) -> list[Check]:
    """The checks but those of parts that one side could not describe."""
    names = {PARTS.get(part, part) for part in unknown}
    if "groups" in unknown or "lr" in unknown:
        names.update(OF_LR)
    return [check for check in checks if check.name not in names]


def _unknown_parts(expected: Expectation, found: Memory) -> Iterator[Check]:
    """A part that could not be described at the save or now is not compared, and that is said."""
    memory = expected.memory
    if memory is None:
        return
    for part, why in memory.unknown.items():
        yield not_compared(PARTS.get(part, part), "M1", f"it could not be described at the save: {why}")
    for part, why in found.unknown.items():
        if part not in memory.unknown:
            yield not_compared(PARTS.get(part, part), "M1", f"it could not be described: {why}")


def check_generators(expected: Expectation, found: Memory, *, rank: int) -> list[Check]:
    """Random generators of this rank; comparable only directly after the load, before anything draws from them."""
    memory = expected.memory
    if memory is None or expected.accepts("rng") or other_world(expected, found):
        return []
    saved, own = memory.of_rank(rank), found.of_rank(rank)
    if saved is None or own is None or not saved.rng:
        return []
    wrong = [name for name, digest in saved.rng.items() if name in own.rng and own.rng[name] != digest]
    words = {"expected": "state of the generators at save", "found": f"{', '.join(wrong)} differ" if wrong else "equal"}
    others = [one.rank for one in memory.ranks if one.rank != rank and one.rng.get("torch") == own.rng.get("torch")]
    cause = f"this rank holds the generators of rank {others[0]}" if others else RULES["random generators"].cause
    return [compared("random generators", "M1", not wrong, where=f"rank {rank}", cause=cause, **words)]


def _contract_only_checks(expected: Expectation, found: Memory) -> Iterator[Check]:
    """For a checkpoint without manifest: what the contract itself promises."""
    contract = expected.contract
    if contract is None:
        return
    if contract.last_epochs and found.schedulers:
        own = sorted(one.last_epoch for one in found.schedulers if one.last_epoch is not None)
        cause = "the scheduler was not restored from this checkpoint"
        where = "schedulers' last_epoch"
        yield judge(expected, "scheduler position", sorted(contract.last_epochs), own, where=where, cause=cause)
    if contract.optimizer_step is not None:
        actual = found.optimizer_steps[1] if found.optimizer_steps else None
        cause = "the optimizer state was not restored"
        yield judge(expected, "optimizer step", contract.optimizer_step, actual, where="optimizer state", cause=cause)


def _step_checks(expected: Expectation, memory: Memory, found: Memory) -> Iterator[Check]:
    if memory.step is not None and found.step is not None:
        cause = "" if found.step else "the step counter was not restored: training would start from zero"
        yield judge(expected, "step", memory.step, found.step, cause=cause)
    if memory.optimizer_steps is not None:
        cause = "the optimizer state was not restored" if found.optimizer_steps is None else ""
        yield judge(expected, "optimizer step", memory.optimizer_steps, found.optimizer_steps, cause=cause)


def _scheduler_checks(expected: Expectation, memory: Memory, found: Memory) -> Iterator[Check]:
    yield judge(expected, "schedulers", [one.name for one in memory.schedulers], [one.name for one in found.schedulers])
    if len(memory.schedulers) != len(found.schedulers):
        return
    moved = expected.contract.last_epochs if expected.contract else ()
    for index, (saved, own) in enumerate(zip(memory.schedulers, found.schedulers, strict=True)):
        where = f"scheduler {index} ({own.name})"
        if own.last_epoch not in moved:
            place, cause = f"{where} last_epoch, {saved.unit} per optimizer step", position_cause(saved, own)
            yield judge(expected, "scheduler position", saved.last_epoch, own.last_epoch, where=place, cause=cause)
        if not other_world(expected, found):
            yield judge(
                expected, "scheduler unit", saved.unit, own.unit, where=f"{where}: scheduler steps per optimizer step"
            )


def _optimizer_checks(expected: Expectation, memory: Memory, found: Memory) -> Iterator[Check]:
    yield judge(expected, "optimizers", list(memory.optimizers), list(found.optimizers))
    same_world = not other_world(expected, found)
    if same_world and (memory.groups or found.groups):
        yield judge(expected, "parameter groups", _sizes(memory), _sizes(found))
    if memory.order and found.order and same_world:
        yield judge(expected, "order of the parameters", memory.order, found.order)
    if len(memory.groups) != len(found.groups):
        return
    for index, (saved, own) in enumerate(zip(memory.groups, found.groups, strict=True)):
        yield from _group_checks(expected, saved, own, f"group {index}")


def _sizes(memory: Memory) -> list[tuple[int, int]]:
    return [(group.num_params, group.num_elements) for group in memory.groups]


def _group_checks(expected: Expectation, saved: ParamGroup, own: ParamGroup, where: str) -> Iterator[Check]:
    yield judge(expected, "parameters with state", saved.num_states, own.num_states, where=where)
    before, after = options_of(saved), options_of(own)
    moved = ("initial_lr", "max_lr", "min_lr") if expected.contract else ()
    for name in sorted(before.keys() & after.keys()):  # a newer torch may know more of them
        is_absent = name in NUMBERS and before[name] is None
        if not is_absent and name not in moved:
            yield judge(expected, name, before[name], after[name], rule="option", key=name, where=where)


def options_of(group: ParamGroup) -> dict[str, Any]:
    """The options of a group but its LR, by name."""
    return {**group.settings, **{name: getattr(group, name) for name in NUMBERS}}


def _topology_checks(expected: Expectation, memory: Memory, found: Memory) -> Iterator[Check]:
    size = memory.topology.get("global_batch")
    same_batch = size is not None and size == found.topology.get("global_batch")
    split = (*SPLIT, *RANKS) if is_other_split(memory, found) else SPLIT
    for key, value in memory.topology.items():
        if key not in found.topology or key == "global_batch" or (key == "num_processes" and accepted_world(expected, found)):
            continue
        own, name = found.topology[key], key.replace("_", " ")
        if value != own and same_batch and key in split:
            why = f"the global batch is the same: {size} samples a step"
            yield noted(name, "M3", expected=str(value), found=str(own), where="topology", cause=why)
            continue
        of_batch = key in SPLIT and expected.accepts("global_batch")
        yield judge(expected, name, value, own, rule="topology", key="global_batch" if of_batch else key)


def _extra_checks(expected: Expectation, memory: Memory, found: Memory) -> Iterator[Check]:
    if memory.scaler is not None:
        yield judge(expected, "loss scaler", memory.scaler, found.scaler)
    for key, digest in memory.averages.items():
        name = f"averaged weights `{key}`"
        if name not in found.unknown:
            yield judge(expected, name, digest, found.averages.get(key), rule="averaged weights")


def _digest_checks(expected: Expectation, memory: Memory, found: Memory, rank: int) -> Iterator[Check]:
    saved, own = saved_digest(expected, memory, found, rank), found.of_rank(rank)
    if saved is None or own is None:
        return
    where = f"sample of every tensor, rank {rank}"
    if saved.weights:
        averages = [name for name, digest in memory.averages.items() if own.weights and digest == own.weights]
        cause = f"these are the averaged weights `{averages[0]}`, not the weights that were trained" if averages else ""
        yield judge(expected, "weights", saved.weights, own.weights, where=where, cause=cause)
    if saved.moments:
        others = [one.rank for one in memory.ranks if one.rank != rank and own.moments and one.moments == own.moments]
        cause = f"this rank holds the optimizer shard of rank {others[0]}" if others else ""
        yield judge(expected, "optimizer moments", saved.moments, own.moments, where=where, cause=cause)


def saved_digest(expected: Expectation, memory: Memory, found: Memory, rank: int) -> RankDigest | None:
    """What this rank must hold: what it saved, or on other ranks what all of them saved alike."""
    saved, elsewhere = memory.of_rank(rank), other_world(expected, found)
    if elsewhere and is_sharded(memory):
        return None
    if saved is not None and not elsewhere:
        return saved
    are_alike = len({digest.weights for digest in memory.ranks}) == 1
    return memory.ranks[0] if are_alike else None


# ---- another number of ranks -----------------------------------------------------------------------------------------


def other_world(expected: Expectation, found: Memory) -> bool:
    """Whether this launch runs on another number of ranks, and may: accepted, or the same samples a step in another split."""
    memory = expected.memory
    if memory is None or not _worlds_differ(memory, found):
        return False
    return expected.accepts("world_size") or is_other_split(memory, found)


def accepted_world(expected: Expectation, found: Memory) -> bool:
    """Whether a person accepted the other number of ranks of this launch; then its schedule may run at another speed."""
    memory = expected.memory
    return memory is not None and expected.accepts("world_size") and _worlds_differ(memory, found)


def is_other_split(memory: Memory, found: Memory) -> bool:
    """Whether other ranks take the same global batch, hold the whole state each, and step the schedule at the same speed."""
    size = memory.topology.get("global_batch")
    if size is None or size != found.topology.get("global_batch") or is_sharded(memory):
        return False
    whole = all(one.topology.get("sharding") in REPLICATED for one in (memory, found))
    return whole and all(a.unit == b.unit for a, b in zip(memory.schedulers, found.schedulers, strict=False))


def _worlds_differ(memory: Memory, found: Memory) -> bool:
    return bool(memory.topology.get("world_size") != found.topology.get("world_size"))


def is_sharded(memory: Memory) -> bool:
    """Whether the ranks hold different optimizer moments."""
    return len({digest.moments for digest in memory.ranks}) > 1


# ---- learning rates: now, in the next steps, and far ahead -----------------------------------------------------------


def _lr_checks(expected: Expectation, found: Memory, by_hand: bool) -> Iterator[Check]:
    tolerance = SAME if expected.contract is None else COMPUTED
    lrs = expected.lrs()
    own = tuple(group.lr for group in found.groups)
    if lrs or (own and lrs is not None):
        # a larger step of a hand-set LR is judged with what is known of it (`allowed.py`)
        allowed = SMALL_JUMP if expected.contract is None else expected.allowed_jump()
        ok = close_rows((lrs,), (own,), allowed - 1 if by_hand else tolerance)
        cause = "" if ok else _lr_cause(expected, found, lrs, own)
        check = judge(expected, "learning rate per group", lrs, lrs if ok else own, cause=cause, show=show_row)
        yield replace(check, found=show_row(own) or "no optimizer")
    rows, ahead = expected.next_lrs(), found.next_lrs
    if rows is None or ahead is None or by_hand or accepted_world(expected, found):
        return
    count = min(len(rows), len(ahead))
    name = "learning rates of the next steps"
    for index in range(count):
        if not close_rows((rows[index],), (ahead[index],), tolerance):
            cause = _forecast_cause(expected, found)
            check = judge(expected, name, rows[index], ahead[index], cause=cause, show=show_row)
            at = f"step +{index + 1}: "
            yield replace(check, expected=at + check.expected, found=at + check.found)
            return
    yield Check(name=name, code="M2", expected=f"{count} steps", found="equal", where=RULES[name].where)


def _warm_up_checks(expected: Expectation, found: Memory) -> Iterator[Check]:
    """The trainer chooses the first LR of a new warm-up, but not above the LR it warms up to."""
    lrs, own = expected.lrs(), tuple(group.lr for group in found.groups)
    if lrs is None or expected.accepts("lr"):
        return
    pairs = zip(own, lrs, strict=False)
    ok = len(own) == len(lrs) and all(a is not None and b is not None and 0 <= a <= b * (1 + COMPUTED) for a, b in pairs)
    cause = "the trainer did not apply the warm-up of the rollback"
    words = {"expected": f"at most {show_row(lrs)}", "found": show_row(own), "where": "optimizer param_groups"}
    yield compared("learning rate of the warm-up", "M2", ok, cause=cause, **words)


def further_checks(expected: Expectation, found: Memory) -> Iterator[Check]:
    """The schedule beyond the forecast: an end or a decay that was moved takes effect only when it is reached."""
    memory = expected.memory
    if memory is None or expected.contract is not None or accepted_world(expected, found):
        return
    for index, (saved, own) in enumerate(zip(memory.schedulers, found.schedulers, strict=False)):
        if saved.name != own.name or len(saved.further) != len(own.further):
            continue
        for points, own_points in zip(saved.further, own.further, strict=True):
            rows = zip(far_points(), points, own_points, strict=False)
            apart = [(step, a, b) for step, a, b in rows if abs(a - b) > SIX_DIGITS * max(abs(a), abs(b))]
            if apart:
                step, a, b = apart[0]
                where = f"function of scheduler {index} ({own.name})"
                check = judge(expected, "schedule further on", a, b, where=where)
                yield replace(check, expected=f"step +{step}: {a:.6g}", found=f"step +{step}: {b:.6g}")
                break


# ---- likely causes: signatures from the catalogue of silent resume failures --------------------------------------------


def _lr_cause(expected: Expectation, found: Memory, lrs: Sequence[float | None], own: Sequence[float | None]) -> str:
    """Why the LRs of the groups (`own`) are not the expected ones (`lrs`)."""
    if not own:
        return "no optimizer is known to the guard: load after prepare()"
    if len(own) != len(lrs):
        return "the number of parameter groups changed"
    if restarted := _restarted_scheduler(expected.memory, found.schedulers):
        return restarted
    contract = expected.contract
    ratio = contract.lr_ratio if contract is not None else None
    if contract is not None and ratio and close_rows((tuple(lr and lr * ratio for lr in own),), (tuple(lrs),), COMPUTED):
        return f"the LR of rollback {contract.rollback} did not reach memory: the script set the old one again"
    if all(lr == 0 for lr in own):
        return "LR is zero: the warm-up starts again"
    return "the optimizer's groups were not restored, or something set their LR after the load"


def _forecast_cause(expected: Expectation, found: Memory) -> str:
    """Why the LRs of the next steps differ although the present ones may not."""
    if restarted := _restarted_scheduler(expected.memory, found.schedulers):
        return restarted
    if expected.memory and [one.unit for one in expected.memory.schedulers] != [one.unit for one in found.schedulers]:
        return "the scheduler advances at a different speed: the number of processes changed"
    return "the schedule differs from the one at the save: other arguments (warm-up, horizon), class, or bound optimizer"


def _restarted_scheduler(memory: Memory | None, schedulers: Sequence[Scheduler]) -> str:
    saved = memory.schedulers if memory else ()
    if saved and not schedulers:
        return "the scheduler is not prepared or registered in this launch: its saved state was not loaded"
    for index, own in enumerate(schedulers):
        if own.last_epoch == 0 and (index >= len(saved) or saved[index].last_epoch):
            return f"scheduler {index} ({own.name}) was not restored: it is at its beginning and would warm up again"
    return ""


def position_cause(saved: Scheduler, own: Scheduler) -> str:
    """Why a scheduler's `last_epoch` differs; "" where nothing more is known."""
    if not own.last_epoch:
        return "the scheduler was not restored: it is at its beginning"
    if not saved.last_epoch:
        return "the scheduler was stepped during the load"
    for factor in (2, 3, 4, 8, 16):
        if own.last_epoch in (saved.last_epoch * factor, saved.last_epoch // factor):
            return f"off by a factor of {factor}: stepped twice, or counted in another number of processes"
    if abs(own.last_epoch - saved.last_epoch) <= saved.unit:
        return "stepped once too often or once too few around the save or the load"
    return ""


# ---- state right after the load, before training changed it ----------------------------------------------------------


def check_loaded(expected: Expectation, loaded: LoadedState, found: Memory, *, rank: int) -> Iterator[Check]:
    """Buffers, frozen parameters and the script's own objects. `found` is memory at the first step.

    A flag or object may change after the load, but it must not stay wrong or become wrong.
    """
    memory = expected.memory
    if memory is None:
        return
    saved = memory.of_rank(rank)
    if saved is not None and saved.each_buffer:
        yield check_buffers(saved.each_buffer, loaded, f"saved buffers, rank {rank}")
    if memory.frozen and found.frozen:
        own = memory.frozen if memory.frozen == loaded.frozen else found.frozen
        yield judge(expected, "frozen parameters", memory.frozen, own)
    for thing, digest in memory.objects.items():
        name, key = f"state of `{thing}`", OBJECT.format(thing)
        if name in found.unknown:
            continue
        own = loaded.facts.get(key, "")
        if own == loaded.then.get(key):
            own = digest  # it has read on, as in the first pass
        elif own != digest and key in loaded.keys:
            yield not_compared(name, "M1", MOVES.format(f"`{thing}`"), where=RULES["registered object"].where)
            continue
        if own == digest and found.objects.get(thing) == loaded.objects_before.get(key) is not None:
            own = found.objects[thing]
        yield judge(expected, name, digest, own, rule="registered object")
    yield from _unregistered_checks(memory, loaded)


def _unregistered_checks(memory: Memory, loaded: LoadedState) -> Iterator[Check]:
    """What moves and nobody registered: it may be meant to begin anew, so it is only said, and the resume is not verified."""
    saved, now = memory.unregistered, loaded.unregistered
    for name in dict.fromkeys(key.partition(".")[0] for key in saved):
        wrong = [key for key in saved if key.partition(".")[0] == name and now.get(key) != saved[key]]
        if wrong:
            key, what = wrong[0], wrong[0].partition(".")[2] or "its content"
            values = f" {saved[key][1:]} → {now[key][1:]}" if key in now and saved[key][0] == "n" else ""
            why = f"nobody registered it, and it is not as at the save: {what}{values}"
            yield not_compared(f"state of `{name}`", "M1", why)
        else:
            yield compared(f"state of `{name}`", "M1", True, expected="as at the save", found="equal")

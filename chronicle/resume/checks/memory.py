"""Memory compared with the expectation: step, optimizer, schedulers, learning rates, topology, weights, generators. Pure.

Codes: M1 fingerprint, M2 forecast of learning rates, M3 topology, M5 object identity. A value that was not recorded at save
is not compared. Checks that passed are returned too, so that the verdict in the journal says what was compared.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from chronicle.resume.buffers import LoadedBuffers, check_buffers
from chronicle.resume.checks.check import (
    SAME,
    Check,
    accepted_world,
    attempt,
    compared,
    equal,
    failed,
    forecast_cause,
    is_other_split,
    is_sharded,
    lr_cause,
    moment_cause,
    moments_cause,
    near,
    not_compared,
    noted,
    other_world,
    position_cause,
    rng_cause,
    show_row,
    step_cause,
    weights_cause,
)
from chronicle.resume.contract import COMPUTED, SMALL_JUMP, Expectation, close_rows, is_close
from chronicle.resume.learning_rate import far_points
from chronicle.resume.memory import Memory, ParamGroup

NORM = 1e-4  # relative: a reduction may be summed in another order
PARTS = {  # of a description, as a person knows them
    "step": "step",
    "groups": "parameter groups",
    "lr": "learning rate per group",
    "moment_norm": "first moments",
    "optimizer_steps": "optimizer step",
    "schedulers": "schedulers",
    "next_lrs": "learning rates of the next steps",
    "scaler": "loss scaler",
    "order": "order of the parameters",
    "frozen": "frozen parameters",
    "training": "training mode",
    "data": "data position",
    "rng": "random generators",
    "moments": "optimizer moments",
}
SIX_DIGITS = 2e-5  # relative: precision in which the far end of a schedule is recorded


def check_memory(expected: Expectation, found: Memory, *, rank: int = 0, at_first_step: bool = False) -> list[Check]:
    """Every comparison that must hold after the load and again right before the first step.

    Between the two a script may set its LR itself, and a trainer that applies a rollback's warm-up begins it.
    """
    checks = list(_unknown_parts(expected, found))
    expected, found = both_known(expected, found)
    memory = expected.memory
    if at_first_step and expected.warms_up:
        checks += attempt("warm-up of the rollback", "M2", lambda: _warm_up_checks(expected, found))
    elif not expected.accepts("lr"):
        by_hand = at_first_step and expected.lr_set_by_hand
        checks += attempt("learning rates", "M2", lambda: _lr_checks(expected, found, by_hand))
        checks += attempt("schedule further on", "M2", lambda: () if by_hand else further_checks(expected, found))
    if memory is None:
        return [*checks, *attempt("contract", "M1", lambda: _contract_only_checks(expected, found))]
    checks += attempt("step", "M1", lambda: _step_checks(memory, found))
    checks += attempt("schedulers", "M1", lambda: _scheduler_checks(expected, memory, found))
    checks += attempt("topology", "M3", lambda: _topology_checks(expected, memory, found))
    checks += attempt("scaler and averages", "M1", lambda: _extra_checks(memory, found))
    # sizes and norms in the manifest are those of the main process: of a sharded optimizer they describe its shard alone
    if rank == 0 or not is_sharded(memory):
        checks += attempt("optimizer", "M1", lambda: _optimizer_checks(expected, memory, found))
    return [*checks, *attempt("weights and moments", "M1", lambda: _digest_checks(expected, memory, found, rank))]


def both_known(expected: Expectation, found: Memory) -> tuple[Expectation, Memory]:
    """Both without the parts that one of them could not describe."""
    memory = expected.memory
    unknown = {**(memory.unknown if memory else {}), **found.unknown}
    if not unknown:
        return expected, found
    return replace(expected, memory=memory and memory.without(unknown)), found.without(unknown)


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
    return [
        compared(
            "random generators",
            "M1",
            not wrong,
            expected="state of the generators at save",
            found=f"{', '.join(wrong)} differ" if wrong else "equal",
            where=f"rank {rank}",
            cause=rng_cause(memory, own.rng, rank) if wrong else "",
        )
    ]


def _contract_only_checks(expected: Expectation, found: Memory) -> Iterator[Check]:
    """For a checkpoint without manifest: what the contract itself promises."""
    contract = expected.contract
    if contract is None:
        return
    if contract.last_epochs and found.schedulers:
        yield equal(
            "scheduler position",
            "M1",
            sorted(contract.last_epochs),
            sorted(s.last_epoch for s in found.schedulers if s.last_epoch is not None),
            "schedulers' last_epoch",
            "the scheduler was not restored from this checkpoint",
        )
    promised = contract.optimizer_step
    if promised is not None:
        actual = found.optimizer_steps[1] if found.optimizer_steps else None
        yield equal("optimizer step", "M1", promised, actual, "optimizer state", "the optimizer state was not restored")


def _is_of_another_optimizer(memory: Memory, found: Memory) -> bool:
    """Whether the saved step is that of the optimizer with most steps, as it was until November 2026, and not of the first."""
    taken, now = memory.optimizer_steps, found.optimizer_steps
    return len(memory.optimizers) > 1 and taken is not None and taken == now and memory.step == taken[1]


def _step_checks(memory: Memory, found: Memory) -> Iterator[Check]:
    if memory.step is not None and found.step is not None and not _is_of_another_optimizer(memory, found):
        yield equal("step", "M1", memory.step, found.step, "the trainer's own counter", step_cause(found))
    if memory.optimizer_steps is not None:
        yield equal(
            "optimizer step",
            "M1",
            memory.optimizer_steps,
            found.optimizer_steps,
            "`step` of the optimizer's per-parameter state (smallest, largest)",
            "the optimizer state was not restored"
            if found.optimizer_steps is None
            else "state of another step was loaded",
        )


def _scheduler_checks(expected: Expectation, memory: Memory, found: Memory) -> Iterator[Check]:
    yield equal(
        "schedulers",
        "M1",
        [s.name for s in memory.schedulers],
        [s.name for s in found.schedulers],
        "schedulers that were prepared or registered",
        "a scheduler is not prepared or registered in this launch, or was replaced or reordered",
    )
    if len(memory.schedulers) != len(found.schedulers):
        return
    moved = expected.contract.last_epochs if expected.contract else ()
    for index, (saved, own) in enumerate(zip(memory.schedulers, found.schedulers, strict=True)):
        where = f"scheduler {index} ({own.name})"
        if own.last_epoch not in moved:
            yield equal(
                "scheduler position",
                "M1",
                saved.last_epoch,
                own.last_epoch,
                f"{where} last_epoch, {saved.unit} per optimizer step",
                position_cause(saved, own),
            )
        if not other_world(expected, found):
            yield equal(
                "scheduler unit",
                "M3",
                saved.unit,
                own.unit,
                f"{where}: scheduler steps per optimizer step",
                "the number of processes changed, so the schedule would run at a different speed",
            )


def _optimizer_checks(expected: Expectation, memory: Memory, found: Memory) -> Iterator[Check]:
    if not expected.accepts("optimizers"):
        yield equal(
            "optimizers",
            "M3",
            list(memory.optimizers),
            list(found.optimizers),
            "optimizer classes",
            "another optimizer class steps with this state, or prepare() was called after the load; "
            'if that is intended, accept "optimizers: why"',
        )
    same_world = not other_world(expected, found)
    saved_sizes, own_sizes = ([(g.num_params, g.num_elements) for g in m.groups] for m in (memory, found))
    if same_world and (memory.groups or found.groups):
        yield equal(
            "parameter groups",
            "M3",
            saved_sizes,
            own_sizes,
            "parameters and elements per group",
            "the model or its grouping is not the one that was saved",
        )
    if memory.order and found.order and same_world:
        yield equal(
            "order of the parameters",
            "M5",
            memory.order,
            found.order,
            "positions in the optimizer against positions in the model",
            "the optimizer was built over the parameters in another order: each parameter gets the moments of another one",
        )
    if len(memory.groups) != len(found.groups):
        return
    for index, (saved, own) in enumerate(zip(memory.groups, found.groups, strict=True)):
        yield from _group_checks(expected, saved, own, f"group {index}", same_world)


def _group_checks(
    expected: Expectation, saved: ParamGroup, own: ParamGroup, where: str, same_world: bool
) -> Iterator[Check]:
    if saved.moment_norm is not None and same_world:
        ok = own.moment_norm is not None and is_close(saved.moment_norm, own.moment_norm, NORM)
        yield compared(
            "first moments",
            "M1",
            ok,
            expected=f"norm {saved.moment_norm:.9g}",
            found="none" if own.moment_norm is None else f"norm {own.moment_norm:.9g}",
            where=where,
            cause="" if ok else moment_cause(own.moment_norm),
        )
    cause = "part of the optimizer state was dropped"
    yield equal("parameters with state", "M1", saved.num_states, own.num_states, where, cause)
    # options that both know: a newer torch may know more of them
    for name in saved.settings.keys() & own.settings.keys():
        if not expected.accepts(name):
            cause = f"the optimizer's `{name}` was set again after the load"
            yield equal(name, "M1", saved.settings[name], own.settings[name], where, cause)
    names = ("weight_decay",) if expected.contract else ("weight_decay", "initial_lr", "max_lr", "min_lr")
    for name in names:
        if not expected.accepts(name) and getattr(saved, name) is not None:
            yield near(name, getattr(saved, name), getattr(own, name), where)


def _topology_checks(expected: Expectation, memory: Memory, found: Memory) -> Iterator[Check]:
    same_batch = _same_global_batch(memory, found)
    split = (*SPLIT, *RANKS) if is_other_split(memory, found) else SPLIT
    for key, value in memory.topology.items():
        if key not in found.topology or key == "global_batch" or (key == "num_processes" and accepted_world(expected, found)):
            continue
        accepted = expected.accepts(key) or (key in SPLIT and expected.accepts("global_batch"))
        if value != found.topology[key] and (accepted or (same_batch and key in split)):
            why = "accepted" if accepted else f"the global batch is the same: {found.topology['global_batch']} samples a step"
            yield noted(
                key.replace("_", " "),
                "M3",
                expected=str(value),
                found=str(found.topology[key]),
                where="topology",
                cause=why,
            )
            continue
        cause = f"this launch runs with another {key}: restore it, or accept the change with a reason"
        yield equal(key.replace("_", " "), "M3", value, found.topology[key], "topology", cause)


SPLIT = ("batch_size", "micro_batch", "accumulation")  # how the samples of a step are split on one rank
RANKS = ("world_size", "num_processes", "sharding")


def _same_global_batch(memory: Memory, found: Memory) -> bool:
    """Whether a step takes as many samples over all ranks as it did, as far as both adapters know."""
    size = memory.topology.get("global_batch")
    return size is not None and size == found.topology.get("global_batch")


def _extra_checks(memory: Memory, found: Memory) -> Iterator[Check]:
    if memory.scaler is not None:
        yield equal(
            "loss scaler",
            "M1",
            dict(memory.scaler),
            None if found.scaler is None else dict(found.scaler),
            "gradient scaler",
            "the scaler's state was not restored; it starts from its initial scale",
        )
    for name, digest in memory.averages.items():
        if f"averaged weights `{name}`" in found.unknown:
            continue
        yield equal(
            f"averaged weights `{name}`",
            "M1",
            digest,
            found.averages.get(name),
            "averaged copy of the model",
            "the average was not restored: it starts from other weights",
        )


def _digest_checks(expected: Expectation, memory: Memory, found: Memory, rank: int) -> Iterator[Check]:
    own = found.of_rank(rank)
    saved = memory.of_rank(rank)
    if saved is None or other_world(expected, found):
        replicated = {digest.weights for digest in memory.ranks}
        saved = memory.ranks[0] if len(replicated) == 1 and memory.ranks else None
    if saved is None or own is None or (other_world(expected, found) and is_sharded(memory)):
        return
    where = f"sample of every tensor, rank {rank}"
    if saved.weights:
        yield equal("weights", "M1", saved.weights, own.weights, where, weights_cause(memory, own.weights))
    if saved.moments:
        cause = moments_cause(memory, own.moments, rank)
        yield equal("optimizer moments", "M1", saved.moments, own.moments, where, cause)


# ---- learning rates: now, in the next steps, and far ahead -----------------------------------------------------------


def _lr_checks(expected: Expectation, found: Memory, by_hand: bool) -> Iterator[Check]:
    tolerance = SAME if expected.contract is None else COMPUTED
    lrs = expected.lrs()
    own = tuple(group.lr for group in found.groups)
    if lrs or (own and lrs is not None):
        # a larger step of a hand-set LR is judged with what is known of it (`hand_set.py`)
        allowed = SMALL_JUMP if expected.contract is None else expected.allowed_jump()
        ok = close_rows((lrs,), (own,), allowed - 1 if by_hand else tolerance)
        yield compared(
            "learning rate per group",
            "M1",
            ok,
            expected=show_row(lrs),
            found=show_row(own) or "no optimizer",
            where="optimizer param_groups",
            cause="" if ok else lr_cause(expected, found, lrs, own),
        )
    rows = expected.next_lrs()
    if rows is None or found.next_lrs is None or by_hand or accepted_world(expected, found):
        return
    count = min(len(rows), len(found.next_lrs))
    bad = next((i for i in range(count) if not close_rows((rows[i],), (found.next_lrs[i],), tolerance)), None)
    yield compared(
        "learning rates of the next steps",
        "M2",
        bad is None,
        expected=f"step +{bad + 1}: {show_row(rows[bad])}" if bad is not None else f"{count} steps",
        found=f"step +{bad + 1}: {show_row(found.next_lrs[bad])}" if bad is not None else "equal",
        where="scheduler and optimizer, stepped on copies",
        cause="" if bad is None else forecast_cause(expected, found),
    )


def _warm_up_checks(expected: Expectation, found: Memory) -> Iterator[Check]:
    """The trainer chooses the first LR of a new warm-up, but not above the LR it warms up to."""
    lrs, own = expected.lrs(), tuple(group.lr for group in found.groups)
    if lrs is None:
        return
    ok = len(own) == len(lrs) and all(
        a is not None and b is not None and 0 <= a <= b * (1 + COMPUTED) for a, b in zip(own, lrs, strict=False)
    )
    yield compared(
        "learning rate of the warm-up",
        "M2",
        ok,
        expected=f"at most {show_row(lrs)}",
        found=show_row(own),
        where="optimizer param_groups",
        cause="" if ok else "the trainer did not apply the warm-up of the rollback",
    )


def further_checks(expected: Expectation, found: Memory) -> Iterator[Check]:
    """The schedule beyond the forecast: an end or a decay that was moved takes effect only when it is reached."""
    memory = expected.memory
    if memory is None or expected.contract is not None or accepted_world(expected, found):
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
                cause="the LR is equal now and differs later: the schedule was built with another length; "
                'if that is intended, accept "schedule: why"',
            )
            break


def _differ(a: float, b: float) -> bool:
    return abs(a - b) > SIX_DIGITS * max(abs(a), abs(b))


# ---- state right after the load, before training changed it ----------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedState:
    """What one rank held right after the load, or (a plain loop) when its first batch came.

    Running statistics change with the first forward pass, flags and the script's own objects whenever the script likes. Their
    state at the load is therefore kept, and judged before the first step.
    """

    buffers: LoadedBuffers = field(default_factory=LoadedBuffers)
    weights: tuple[str, str] = ("", "")  # when the first batch came: all, and those that are trained
    frozen: str = ""
    objects: Mapping[str, str] = field(default_factory=dict)
    objects_before: Mapping[str, str] = field(default_factory=dict)  # before the load: as the script made them


def check_loaded(expected: Expectation, loaded: LoadedState, found: Memory, *, rank: int) -> Iterator[Check]:
    """Buffers, frozen parameters and the script's own objects. `found` is memory at the first step.

    A flag or object may change after the load, but it must not stay wrong or become wrong.
    """
    expected, found = both_known(expected, found)
    memory = expected.memory
    if memory is None:
        return
    saved = memory.of_rank(rank)
    if saved is not None and saved.buffers:
        yield check_buffers(saved.buffers, loaded.buffers, f"saved buffers, rank {rank}")
    if memory.frozen and found.frozen and not expected.accepts("frozen_parameters"):
        own = memory.frozen if memory.frozen == loaded.frozen else found.frozen
        where, cause = "requires_grad", "the set of trained layers changed"
        yield equal("frozen parameters", "M3", memory.frozen, own, where, cause)
    for name, digest in memory.objects.items():
        if f"state of `{name}`" in found.unknown:
            continue
        own = loaded.objects.get(name, "")
        if own == digest and found.objects.get(name) == loaded.objects_before.get(name) is not None:
            own = found.objects[name]
        where, cause = "register_for_checkpointing", "it was not restored, or was created again after the load"
        yield equal(f"state of `{name}`", "M1", digest, own, where, cause)


def check_mode(expected: Expectation, found: Memory) -> Iterator[Check]:
    """Whether the models are in the same training mode as at the last step before the save."""
    modes = expected.memory.training if expected.memory else None
    if modes is None or found.training is None or len(modes) != len(found.training):
        return
    cause = "a validation before the first step left the model without dropout: call `model.train()`"
    yield equal("training mode", "M1", _modes(modes), _modes(found.training), "model.training", cause)


def _modes(modes: tuple[bool, ...]) -> str:
    return ", ".join("training" if mode else "evaluation" for mode in modes)

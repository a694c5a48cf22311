"""Memory against expectation: every comparison the guard makes, each with its likely cause. Pure.

Codes are the primitives of the evidence table: M1 fingerprint, M2 LR oracle, M3 topology, M4 data, M5 object identity.
Nothing is compared that was not recorded; nothing that was recorded is left out silently: `Check.ok` rows say what held.
"""

from collections.abc import Iterator

from chronicle.resume.checks.comparing import equal, is_sharded, near, other_world
from chronicle.resume.contract import Expectation, close
from chronicle.resume.checks.likely_causes import (
    moment_cause,
    moments_cause,
    position_cause,
    rng_cause,
    step_cause,
    weights_cause,
)
from chronicle.resume.checks.lr_checks import further_checks, lr_checks, warm_up_checks
from chronicle.resume.memory import Group, Memory
from chronicle.resume.checks.check import Check

__all__ = ["check_memory", "check_rng"]

NORM = 1e-4  # relative: a reduction may be summed in another order


def check_memory(expected: Expectation, found: Memory, *, rank: int = 0, at_first_step: bool = False) -> list[Check]:
    """All comparisons that must hold both after the load and right before the first step.

    In between a script may set its LR itself, and a trainer that honours a contract begins its warm-up.
    """
    memory = expected.memory
    checks: list[Check] = []
    if at_first_step and expected.warms_up:
        checks += warm_up_checks(expected, found)
    elif not expected.accepts("lr"):
        by_hand = at_first_step and expected.lr_set_by_hand
        checks += [*lr_checks(expected, found, by_hand), *(() if by_hand else further_checks(expected, found))]
    if memory is None:
        return checks + list(_contract_only_checks(expected, found))
    for part in (_step_checks, _scheduler_checks, _topology_checks, _extra_checks):
        checks += part(expected, memory, found)
    # sizes and norms in the manifest are the main process's own: of a sharded optimizer they describe its shard alone
    if rank == 0 or not is_sharded(memory):
        checks += _optimizer_checks(expected, memory, found)
    return checks + list(_digest_checks(expected, memory, found, rank))


def check_rng(expected: Expectation, found: Memory, *, rank: int) -> list[Check]:
    """The generators of this rank: only comparable directly after the load, before anything draws from them."""
    memory = expected.memory
    if memory is None or expected.accepts("rng") or other_world(expected, found):
        return []
    promised, own = memory.of_rank(rank), found.of_rank(rank)
    if promised is None or own is None or not promised.rng:
        return []
    wrong = [name for name, digest in promised.rng.items() if name in own.rng and own.rng[name] != digest]
    return [
        Check(
            name="random generators",
            code="M1",
            ok=not wrong,
            expected="state of the generators at save",
            found=f"{', '.join(wrong)} differ" if wrong else "equal",
            where=f"rank {rank}",
            cause=rng_cause(memory, own.rng, rank) if wrong else "",
        )
    ]


def _contract_only_checks(expected: Expectation, found: Memory) -> Iterator[Check]:
    """A checkpoint without manifest: what the contract itself promises."""
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


def _step_checks(expected: Expectation, memory: Memory, found: Memory) -> Iterator[Check]:
    if memory.step is not None and found.step is not None:
        yield equal("step", "M1", memory.step, found.step, "the trainer's own counter", step_cause(memory, found))
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
                "the number of processes changed, so the schedule would run at another speed",
            )


def _optimizer_checks(expected: Expectation, memory: Memory, found: Memory) -> Iterator[Check]:
    yield equal(
        "optimizers",
        "M3",
        list(memory.optimizers),
        list(found.optimizers),
        "optimizer classes",
        "another optimizer class is used in this launch, or prepare() was called after the load",
    )
    saved_sizes, own_sizes = ([(g.num_params, g.num_elements) for g in m.groups] for m in (memory, found))
    if not other_world(expected, found):
        yield equal(
            "parameter groups",
            "M3",
            saved_sizes,
            own_sizes,
            "parameters and elements per group",
            "the model or its grouping is not the one that was saved",
        )
    if memory.order and found.order and not other_world(expected, found):
        yield equal(
            "order of the parameters",
            "M5",
            memory.order,
            found.order,
            "places of the optimizer against those of the model",
            "the optimizer was built over the parameters in another order: each gets the moments of another",
        )
    if len(memory.groups) != len(found.groups):
        return
    for index, (saved, own) in enumerate(zip(memory.groups, found.groups, strict=True)):
        where = f"group {index}"
        if saved.moment_norm is not None and not other_world(expected, found):
            ok = own.moment_norm is not None and close(saved.moment_norm, own.moment_norm, NORM)
            yield Check(
                name="first moments",
                code="M1",
                ok=ok,
                expected=f"norm {saved.moment_norm:.9g}",
                found="none" if own.moment_norm is None else f"norm {own.moment_norm:.9g}",
                where=where,
                cause="" if ok else moment_cause(own.moment_norm),
            )
        yield equal(
            "parameters with state",
            "M1",
            saved.num_states,
            own.num_states,
            where,
            "part of the optimizer state was dropped",
        )
        yield from _setting_checks(expected, saved, own, where)
        names = ("weight_decay",) if expected.contract else ("weight_decay", "initial_lr", "max_lr", "min_lr")
        for name in names:
            if not expected.accepts(name) and getattr(saved, name) is not None:
                yield near(name, getattr(saved, name), getattr(own, name), where)


def _setting_checks(expected: Expectation, saved: Group, own: Group, where: str) -> Iterator[Check]:
    """Options of the group that both know; a newer torch may know more of them."""
    for name in saved.settings.keys() & own.settings.keys():
        if not expected.accepts(name):
            cause = f"the optimizer's `{name}` was set again after the load"
            yield equal(name, "M1", saved.settings[name], own.settings[name], where, cause)


def _topology_checks(expected: Expectation, memory: Memory, found: Memory) -> Iterator[Check]:
    for key, value in memory.topology.items():
        if expected.accepts(key) or key not in found.topology:
            continue
        if key == "num_processes" and other_world(expected, found):
            continue
        cause = f"this launch runs with another {key}: restore it, or accept the change with a reason"
        yield equal(key.replace("_", " "), "M3", value, found.topology[key], "topology", cause)


def _extra_checks(expected: Expectation, memory: Memory, found: Memory) -> Iterator[Check]:
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
    if saved.weights:
        yield equal(
            "weights",
            "M1",
            saved.weights,
            own.weights,
            f"sample of every tensor, rank {rank}",
            weights_cause(memory, own.weights),
        )
    if saved.moments:
        yield equal(
            "optimizer moments",
            "M1",
            saved.moments,
            own.moments,
            f"sample of every tensor, rank {rank}",
            moments_cause(memory, own.moments, rank),
        )

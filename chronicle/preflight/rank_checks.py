"""Checks over all ranks: devices, collectives, seeds, finite gradients, memory. Pure.

Source: seed 000 ("Using 4 GPUs", `device_ids=[0]`); `accelerate launch --cpu --num_processes 2` starts one process.
"""

from __future__ import annotations

from collections import defaultdict

from chronicle.preflight.answers import Answer
from chronicle.preflight.expectation import Expectation
from chronicle.preflight.facts import RankFacts, TrainerFacts
from chronicle.preflight.results import CheckResult

__all__ = ["check_collectives", "check_devices", "check_gradients", "check_memory", "check_seeds"]

SLOW_COLLECTIVE_SECONDS = 60.0
TIGHT = 0.9  # of what is free: what the driver, the libraries and the allocator take is not counted


def check_devices(facts: TrainerFacts, expected: Expectation) -> CheckResult:
    """PF04: as many distinct devices as were asked for, one rank on each, and everybody sees the same world."""
    answer = Answer("PF04", "devices")
    if not facts.ranks:
        return answer.unknown("no rank has reported its device")
    asked = expected.claimed_devices or expected.binding_plan.get("world_size")
    devices: dict[str, list[int]] = defaultdict(list)
    for rank in facts.ranks:
        devices[rank.device].append(rank.rank)
    read = f"{len(facts.ranks)} ranks reported {len(devices)} distinct devices"
    sizes = {"ranks that reported": len(facts.ranks), **facts.world_sizes_seen}
    if len(set(sizes.values())) > 1:
        said = ", ".join(f"{who}: {size}" for who, size in sizes.items())
        return answer.failed(f"the world size is not agreed: {said}", read, "start it with torchrun")
    shared = {device: ranks for device, ranks in devices.items() if len(ranks) > 1}
    if shared:
        device, ranks = next(iter(shared.items()))
        found = f"{len(devices)} distinct device{'s' if len(devices) > 1 else ''}"
        text = f"asked {asked or len(facts.ranks)}, {found}: ranks {', '.join(map(str, ranks))} all on {device}"
        return answer.failed(text, read, "look at CUDA_VISIBLE_DEVICES and device_ids")
    if asked is not None and len(devices) != asked:
        return answer.failed(f"asked {asked} devices, {len(devices)} in use", read, "look at the launcher's arguments")
    return answer.passed(f"{len(devices)} devices, one rank each", read)


def check_collectives(facts: TrainerFacts, expected: Expectation) -> CheckResult:
    """PF10: a sum over rank numbers is right and quick, and all replicas start from the same weights."""
    answer = Answer("PF10", "collectives")
    if facts.collective_correct is None:
        return answer.unknown("no collective was tried")
    if not facts.collective_correct:
        return answer.failed("the sum of the rank numbers came out wrong", "one all-reduce", "check NCCL and the network")
    if facts.collective_seconds is not None and facts.collective_seconds > SLOW_COLLECTIVE_SECONDS:
        return answer.failed(f"one all-reduce took {facts.collective_seconds:.0f} s", "one all-reduce", "check the network")
    differing = _groups({rank.weights_digest for rank in facts.ranks})
    if differing > 1 and all(rank.params_local == facts.params_counted for rank in facts.ranks):
        text = f"replicas start from {differing} different sets of weights"
        return answer.failed(text, "digests of the weights", "seed before building the model, or broadcast it")
    return answer.passed("sums right" + (", weights equal" if differing == 1 else ""), "one all-reduce")


def check_seeds(facts: TrainerFacts, expected: Expectation) -> CheckResult:
    """PF19: no two data ranks read the same first batch."""
    answer = Answer("PF19", "every rank reads its own data")
    known = [rank for rank in facts.ranks if rank.first_batch_digest is not None]
    if len(known) < 2:
        return answer.unknown("first batches of at least two ranks")
    by_batch: dict[str, list[RankFacts]] = defaultdict(list)
    for rank in known:
        by_batch[str(rank.first_batch_digest)].append(rank)
    for ranks in by_batch.values():
        readers = {rank.rank if rank.data_rank is None else rank.data_rank for rank in ranks}
        if len(readers) > 1:
            numbers = ", ".join(str(rank.rank) for rank in ranks)
            remedy = "split the data by rank, or give every rank its own sampler seed"
            return answer.failed(f"ranks {numbers} read the same first batch", f"{len(known)} digests", remedy)
    return answer.passed(f"{len(by_batch)} different first batches", f"{len(known)} digests")


def check_gradients(facts: TrainerFacts, expected: Expectation) -> CheckResult:
    """PF26: after one backward pass the gradients are finite on every rank."""
    answer = Answer("PF26", "gradients finite on all ranks")
    known = [rank for rank in facts.ranks if rank.gradients_finite is not None]
    if not known:
        return answer.unknown("no backward pass was tried")
    bad = [str(rank.rank) for rank in known if not rank.gradients_finite]
    if bad:
        remedy = "look at the activations before the first infinite one; all ranks must skip the step together"
        return answer.failed(f"not finite on rank {', '.join(bad)}", f"{len(known)} ranks", remedy)
    return answer.passed(f"finite on {len(known)} ranks", f"{len(known)} ranks")


def check_memory(facts: TrainerFacts, expected: Expectation) -> CheckResult:
    """PF31: every rank has the memory that the trainer says a rank will need."""
    answer = Answer("PF31", "memory")
    needed = sum(facts.memory_needed.values())
    known = [(rank.memory_free, rank) for rank in facts.ranks if rank.memory_free is not None]
    if not needed or not known:
        return answer.unknown("what a rank will need" if not needed else "what is free")
    free, rank = min(known, key=lambda pair: pair[0])
    parts = ", ".join(f"{name} {size / 1e9:,.2f}" for name, size in facts.memory_needed.items())
    text = f"a rank needs {needed / 1e9:,.2f} GB ({parts}), rank {rank.rank} on {rank.host} has {free / 1e9:,.2f} GB"
    ways = f"it would fit with {' or with '.join(facts.memory_ways)}" if facts.memory_ways else (
        "recompute activations, shard over more ranks, take a smaller micro-batch or a smaller model")
    read = f"the trainer's arithmetic; free memory of {len(known)} ranks"
    if needed > free:
        return answer.failed(text, read, ways)
    if needed > TIGHT * free:
        return answer.warned(f"{text}: less than a tenth is left", read, ways)
    return answer.passed(text, read)


def _groups(values: set[str | None]) -> int:
    return len(values - {None})

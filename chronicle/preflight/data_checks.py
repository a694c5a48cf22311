"""Checks of the data and of the ranks that read it: shards, labels, samples, devices, collectives, memory. Pure.

Sources: seed 001 (2 data shards for 16 readers), seed 000 (5 samples; "Using 4 GPUs" with `device_ids=[0]`), seed 004 (all
labels -100); `accelerate launch --cpu --num_processes 2` starts one process.
"""

from __future__ import annotations

from collections import defaultdict

from chronicle.preflight.facts import Baseline, RankFacts, TrainerFacts
from chronicle.preflight.results import CheckAnswer, CheckResult

FEW_SAMPLES = 1000
MOSTLY = 0.9  # of the labels
HALF = 0.5  # of the positions
CORPUS_FRACTION = 0.01  # of the named corpus
LEAK_TOLERANCE = 1e-5


def check_shards(facts: TrainerFacts, expected: Baseline) -> CheckResult:
    """PF01: every reader (rank × worker) gets a data shard."""
    answer = CheckAnswer("PF01", "data shards for every reader")
    shards, world, workers = facts.num_data_shards, facts.world_size, facts.num_workers
    if facts.data_addressable:
        return answer.passed("every reader reads any sample by its number", "the trainer's data plan")
    if shards is None or world is None or workers is None:
        return answer.unknown("the trainer did not report data shards, ranks or workers (`attach(..., data=loader)` does)")
    per_rank = max(workers, 1)
    readers = world * per_rank
    starved = max(0, readers - shards)
    text = f"{shards} data shards for {world} ranks × {per_rank} workers = {readers} readers"
    read = f"shards {shards}, world size {world}, workers {workers}"
    if facts.data_resampled and shards > 0:
        return answer.passed(f"{text}, resampled", read)
    remedy = f"use ≤ {shards // world} workers a rank, or reshard to ≥ {readers}"
    if shards < world:
        return answer.failed(f"{text}; {world - shards} ranks get nothing and the others wait for them", read, remedy)
    if shards < readers:
        return answer.failed(f"{text}; {starved} get nothing", read, remedy)
    if shards % world:
        return answer.warned(f"{text}: ranks end unevenly", read, f"use a multiple of {world} shards, or resample")
    return answer.passed(text, read)


def check_labels(facts: TrainerFacts, expected: Baseline) -> CheckResult:
    """PF14: not all labels are masked."""
    answer = CheckAnswer("PF14", "labels")
    masked = facts.masked_fractions
    if not masked:
        return answer.unknown("the trainer reported no collated batch")
    read = f"{len(masked)} batches"
    share = sum(masked) / len(masked)
    if min(masked) >= 1.0:
        remedy = "look at the chat template and the response markers"
        return answer.failed("all labels are −100: loss will be 0", read, remedy)
    if share > MOSTLY:
        return answer.warned(f"{share:.0%} of the labels are masked", read, "look at a decoded sample")
    return answer.passed(f"{share:.0%} of the labels are masked", read)


def check_size(facts: TrainerFacts, expected: Baseline) -> CheckResult:
    """PF15: the data are as large as claimed, and not mostly padding."""
    answer = CheckAnswer("PF15", "data size and padding")
    distinct = facts.num_distinct_samples if facts.num_distinct_samples is not None else facts.num_samples
    size = facts.dataset_bytes
    if distinct is None and size is None:
        return answer.unknown("the trainer did not report samples and bytes (`attach(..., data=loader)` does)")
    read = f"{_or_unknown(distinct)} distinct samples, {_or_unknown(size)} bytes"
    if distinct is not None and distinct < FEW_SAMPLES:
        named = f"; the data are called {facts.dataset}" if facts.dataset else ""
        return answer.warned(f"{distinct:,} distinct samples{named}", read, "a model of this size memorises them")
    if facts.pad_fraction is not None and facts.pad_fraction > HALF:
        return answer.warned(f"{facts.pad_fraction:.0%} of the positions are padding", read, "pack the samples")
    return answer.passed(read, read)


def check_samples(facts: TrainerFacts, expected: Baseline) -> CheckResult:
    """PF16: samples decode to exactly their original bytes; the first one is shown."""
    answer = CheckAnswer("PF16", "decoded samples")
    if not facts.samples:
        return answer.unknown("no sample was decoded")
    first = facts.samples[0].text[:60].replace("\n", "⏎")
    read = f"{len(facts.samples)} samples, the first: {first}"
    wrong = sum(sample.exact is False for sample in facts.samples)
    if wrong:
        return answer.failed(f"{wrong} of {len(facts.samples)} do not decode to their bytes", read, "check the encoding")
    if any(sample.exact is None for sample in facts.samples):
        return answer.unknown("the trainer did not report whether the round trip is exact")
    return answer.passed(f"{len(facts.samples)} samples decode exactly", read)


def check_causality(facts: TrainerFacts, expected: Baseline) -> CheckResult:
    """PF17: changing a token changes no earlier logit."""
    answer = CheckAnswer("PF17", "causality")
    if facts.future_leak is None:
        return answer.unknown("the trainer did not run the causality test")
    read = f"largest change of an earlier logit: {facts.future_leak:.3g}"
    if facts.future_leak > LEAK_TOLERANCE:
        return answer.failed("earlier positions depend on later ones", read, "check the attention mask")
    return answer.passed("no position depends on a later one", read)


def _or_unknown(number: int | None) -> str:
    return "unknown" if number is None else f"{number:,}"


# ---- ranks: devices, collectives, seeds, gradients, memory -----------------------------------------------------------

SLOW_COLLECTIVE_SECONDS = 60.0
TIGHT = 0.9  # of the free memory: the share of driver, libraries and allocator is not counted


def check_devices(facts: TrainerFacts, expected: Baseline) -> CheckResult:
    """PF04: as many distinct devices as requested, one rank on each, and one world size for all."""
    answer = CheckAnswer("PF04", "devices")
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
        return answer.failed(f"ranks disagree about the world size: {said}", read, "start it with torchrun")
    shared = {device: ranks for device, ranks in devices.items() if len(ranks) > 1}
    if shared:
        device, ranks = next(iter(shared.items()))
        found = f"{len(devices)} distinct device{'s' if len(devices) > 1 else ''}"
        text = f"asked {asked or len(facts.ranks)}, {found}: ranks {', '.join(map(str, ranks))} all on {device}"
        return answer.failed(text, read, "check CUDA_VISIBLE_DEVICES and device_ids")
    if asked is not None and len(devices) != asked:
        return answer.failed(f"{asked} devices requested, {len(devices)} in use", read, "check the launcher's arguments")
    return answer.passed(f"{len(devices)} devices, one rank each", read)


def check_collectives(facts: TrainerFacts, expected: Baseline) -> CheckResult:
    """PF10: a sum over rank numbers is correct and fast, and all replicas start from the same weights."""
    answer = CheckAnswer("PF10", "collectives")
    if facts.collective_correct is None:
        return answer.passed("one rank: nothing is summed", "1 rank") if facts.world_size == 1 else answer.unknown(
            "no collective was tried"
        )
    if not facts.collective_correct:
        return answer.failed("the sum of the rank numbers is wrong", "one all-reduce", "check NCCL and the network")
    if facts.collective_seconds is not None and facts.collective_seconds > SLOW_COLLECTIVE_SECONDS:
        return answer.failed(f"one all-reduce took {facts.collective_seconds:.0f} s", "one all-reduce", "check the network")
    differing = _groups({rank.weights_digest for rank in facts.ranks})
    if differing > 1 and all(rank.params_local == facts.params_counted for rank in facts.ranks):
        text = f"replicas start from {differing} different sets of weights"
        return answer.failed(text, "digests of the weights", "seed before building the model, or broadcast it")
    return answer.passed("sums correct" + (", weights equal" if differing == 1 else ""), "one all-reduce")


def check_seeds(facts: TrainerFacts, expected: Baseline) -> CheckResult:
    """PF19: no two data ranks read the same first batch."""
    answer = CheckAnswer("PF19", "every rank reads its own data")
    known = [rank for rank in facts.ranks if rank.first_batch_digest is not None]
    if facts.world_size == 1:
        return answer.passed("one rank reads all of it", "1 rank")
    if len(known) < 2:
        return answer.unknown("fewer than two ranks reported their first batch")
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


def check_gradients(facts: TrainerFacts, expected: Baseline) -> CheckResult:
    """PF26: after one backward pass the gradients are finite on every rank."""
    answer = CheckAnswer("PF26", "gradients finite on all ranks")
    known = [rank for rank in facts.ranks if rank.gradients_finite is not None]
    if not known:
        return answer.unknown("no backward pass was tried")
    bad = [str(rank.rank) for rank in known if not rank.gradients_finite]
    if bad:
        remedy = "look at the activations before the first infinite one; all ranks must skip the step together"
        return answer.failed(f"not finite on rank {', '.join(bad)}", f"{len(known)} ranks", remedy)
    return answer.passed(f"finite on {len(known)} ranks", f"{len(known)} ranks")


def check_free_memory(facts: TrainerFacts, expected: Baseline) -> CheckResult:
    """PF31: every rank has the memory that the trainer says it needs."""
    answer = CheckAnswer("PF31", "memory")
    needed = sum(facts.memory_needed.values())
    known = [(rank.memory_free, rank) for rank in facts.ranks if rank.memory_free is not None]
    if not needed or not known:
        return answer.unknown(
            "the trainer did not report the memory that a rank needs"
            if not needed
            else "the trainer did not report the free memory"
        )
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

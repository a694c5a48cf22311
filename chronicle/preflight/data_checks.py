"""Checks on what is read: shards against readers, masks, padding, decoded samples, causality. Pure.

Sources: seed 001 (2 data shards for 16 readers), seed 000 (5 samples), seed 004 (all labels −100).
"""

from __future__ import annotations

from chronicle.preflight.answers import Answer
from chronicle.preflight.expectation import Expectation
from chronicle.preflight.facts import TrainerFacts
from chronicle.preflight.results import CheckResult

__all__ = ["check_causality", "check_labels", "check_samples", "check_shards", "check_size"]

FEW_SAMPLES = 1000
MOSTLY = 0.9
HALF = 0.5
CORPUS_FRACTION = 0.01
LEAK_TOLERANCE = 1e-5


def check_shards(facts: TrainerFacts, expected: Expectation) -> CheckResult:
    """PF01: every reader (rank × worker) gets a data shard."""
    answer = Answer("PF01", "data shards for every reader")
    shards, world, workers = facts.num_data_shards, facts.world_size, facts.num_workers
    if facts.data_addressable:
        return answer.passed("every reader reads any sample by its number", "the trainer's data plan")
    if shards is None or world is None or workers is None:
        return answer.unknown("data shards, ranks or workers")
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


def check_labels(facts: TrainerFacts, expected: Expectation) -> CheckResult:
    """PF14: labels are there."""
    answer = Answer("PF14", "labels")
    masked = facts.masked_fractions
    if not masked:
        return answer.unknown("no collated batch was looked at")
    read = f"{len(masked)} batches"
    share = sum(masked) / len(masked)
    if min(masked) >= 1.0:
        remedy = "look at the chat template and the response markers"
        return answer.failed("all labels are −100: loss will be 0", read, remedy)
    if share > MOSTLY:
        return answer.warned(f"{share:.0%} of the labels are masked", read, "look at a decoded sample")
    return answer.passed(f"{share:.0%} of the labels are masked", read)


def check_size(facts: TrainerFacts, expected: Expectation) -> CheckResult:
    """PF15: the data are as large as is said, and not padding."""
    answer = Answer("PF15", "data size and padding")
    distinct = facts.num_distinct_samples if facts.num_distinct_samples is not None else facts.num_samples
    size, claimed = facts.dataset_bytes, expected.claimed_dataset_bytes
    if distinct is None and size is None:
        return answer.unknown("samples and bytes")
    read = f"{_or_unknown(distinct)} distinct samples, {_or_unknown(size)} bytes"
    if size is not None and claimed is not None and size < CORPUS_FRACTION * claimed:
        text = f"{size:,} bytes; the corpus that is named has {claimed:,}"
        return answer.failed(text, read, "name the data that is really read")
    if distinct is not None and distinct < FEW_SAMPLES:
        named = f"; the data are called {facts.dataset}" if facts.dataset else ""
        return answer.warned(f"{distinct:,} distinct samples{named}", read, "a model this size learns them by heart")
    if facts.pad_fraction is not None and facts.pad_fraction > HALF:
        return answer.warned(f"{facts.pad_fraction:.0%} of the positions are padding", read, "pack the samples")
    return answer.passed(read, read)


def check_samples(facts: TrainerFacts, expected: Expectation) -> CheckResult:
    """PF16: samples decode back to exactly what went in; shown, so that a person can look."""
    answer = Answer("PF16", "decoded samples")
    if not facts.samples:
        return answer.unknown("no sample was decoded")
    first = facts.samples[0].text[:60].replace("\n", "⏎")
    read = f"{len(facts.samples)} samples, the first: {first}"
    wrong = sum(sample.exact is False for sample in facts.samples)
    if wrong:
        return answer.failed(f"{wrong} of {len(facts.samples)} do not decode to their bytes", read, "check the encoding")
    if any(sample.exact is None for sample in facts.samples):
        return answer.unknown("whether the round trip is exact")
    return answer.passed(f"{len(facts.samples)} samples decode exactly", read)


def check_causality(facts: TrainerFacts, expected: Expectation) -> CheckResult:
    """PF17: changing a token changes nothing before it."""
    answer = Answer("PF17", "causality")
    if facts.future_leak is None:
        return answer.unknown("no token was changed")
    read = f"largest change of an earlier logit: {facts.future_leak:.3g}"
    if facts.future_leak > LEAK_TOLERANCE:
        return answer.failed("earlier positions see later ones", read, "check the attention mask")
    return answer.passed("earlier positions see nothing later", read)


def _or_unknown(number: int | None) -> str:
    return "unknown" if number is None else f"{number:,}"

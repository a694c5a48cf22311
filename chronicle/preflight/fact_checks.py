"""The checks of what a trainer says about itself, as one table: model, data, ranks, schedule, saves, experiments. Pure.

Sources: seed 000 ("1B" that was 771,176,450; 5 samples; "Using 4 GPUs" with `device_ids=[0]`; K = C = S = 0.000), seed 001
(169,990,657 is ceil(679,962,626 / 4), one rank's part; 2 data shards for 16 readers), seed 002 tasks 1 and 4 (a horizon that
forgot the accumulation), seed 004 (labels −100); `accelerate launch --cpu --num_processes 2` starts one process.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from chronicle.preflight.facts import PLAN_KEYS, RankFacts, TrainerFacts, declare_plan
from chronicle.preflight.results import CheckAnswer, CheckRow, fails, passes, unknown, warns

CLAIM_TOLERANCE = 0.01
UNREPORTED = "the trainer did not report "
BY_LOADER = " (`attach(..., data=loader)` does)"


# ---- model: counts, wrapper, plan ---------------------------------------------------------------


def _claimed_count(counted: int, claimed: float) -> CheckAnswer:
    """PF02: the counted parameters are those claimed, within 1 %."""
    off = (counted - claimed) / claimed
    text, read = f"claim {claimed:,.0f}, counted {counted:,} ({off:+.1%})", f"counted {counted:,} before wrapping"
    if abs(off) <= CLAIM_TOLERANCE:
        return passes(text, read)
    return fails(text, read, "correct the claim, or train the model that was claimed")


def _three_counts(logical: int, counted: int, ranks: tuple[RankFacts, ...]) -> CheckAnswer:
    """PF03: the formula, the count before wrapping and the counts on the ranks agree."""
    local = [rank.params_local for rank in ranks if rank.params_local is not None]
    read = f"formula {logical:,}, counted {counted:,}, local {', '.join(f'{n:,}' for n in local[:8]) or 'unknown'}"
    if logical != counted:
        share = ""
        for size in {len(ranks), 2, 4, 8, 16, 32, 64} - {0, 1}:
            if counted == math.ceil(logical / size):
                share = f": exactly 1/{size}, a count taken on one rank after sharding"
        text = f"formula says {logical:,}, counted {counted:,}{share}"
        return fails(text, read, "count before wrapping, and look at the formula")
    if local and not _local_fits(counted, local):
        return fails(f"{len(local)} ranks hold {sum(local):,} of {counted:,}", read, "check the wrapper")
    return passes(f"{counted:,} by formula and by count", read)


def _local_fits(counted: int, local: list[int]) -> bool:
    """Every rank holds all of it, or the parts add up, padding aside. Flat parameters are padded per unit."""
    if all(part == counted for part in local):
        return True
    return counted <= sum(local) <= counted + len(local) * 64 * 64


def _wrapper(found: str | None, plan: Mapping[str, Any], world_size: int | None) -> CheckAnswer:
    """PF05: the class that wraps the model is the declared one."""
    claimed = plan.get("wrapper")
    if found is None and claimed is None and world_size == 1:
        return passes("none: one rank holds the whole model", "1 rank")
    if found is None:
        return unknown(f"{UNREPORTED}the model's wrapper")
    if claimed is None:
        return unknown("no wrapper was declared")
    if _same_wrapper(found.lower(), str(claimed).lower()):
        return passes(found, f"class {found}")
    remedy = "start it under the launcher that shards it, or declare the wrapper that is intended"
    return fails(f"declared {claimed}, found {found}", f"class {found}", remedy)


def _same_wrapper(one: str, other: str) -> bool:
    families = (
        ("fsdp", "fullyshardeddataparallel", "fsdpmodule"),
        ("ddp", "distributeddataparallel"),
        ("dp", "dataparallel"),
        ("deepspeed", "deepspeedengine", "zero"),
    )
    return one == other or any(one in family and other in family for family in families)


def _plan(plan: Mapping[str, Any], facts: TrainerFacts, accepted: str | None) -> CheckAnswer:
    """PF06: model, data, topology and precision are those of the declared plan, or the change was accepted."""
    now = declare_plan(facts)
    changes = describe_changes(plan, now)
    read = f"compared {', '.join(key for key in PLAN_KEYS if key in plan and key in now)}"
    if not changes:
        return passes("as declared", read)
    text = "; ".join(changes)
    if accepted:
        return passes(f"changed and accepted ({accepted}): {text}", read)
    return fails(text, read, 'start with the declared plan, or accept it with `chronicle run --accept-change "reason"`')


def describe_changes(plan: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One text per changed key; keys that are unknown on one side are left out."""
    changes = []
    for key in PLAN_KEYS:
        if key in plan and key in now and key != "config" and plan[key] != now[key]:
            changes.append(f"{key}: {_shown(plan[key])} → {_shown(now[key])}{_shrunk(plan[key], now[key])}")
    before, after = plan.get("config") or {}, now.get("config") or {}
    for key in sorted(set(before) & set(after)):
        if before[key] != after[key]:
            changes.append(f"{key}: {_shown(before[key])} → {_shown(after[key])}")
    return changes


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _shrunk(before: Any, after: Any) -> str:
    are_counts = isinstance(before, int) and isinstance(after, int)
    return f" ({1 - after / before:.0%} smaller)" if are_counts and 0 <= after < before else ""


# ---- data ------------------------------------------------------------------------------------------------------------

FEW_SAMPLES = 1000
MOSTLY = 0.9  # of the labels
HALF = 0.5  # of the positions


def _shards(
    is_addressable: bool, is_resampled: bool, shards: int | None, world: int | None, workers: int | None
) -> CheckAnswer:
    """PF01: every reader (rank × worker) gets a data shard."""
    if is_addressable:
        return passes("every reader reads any sample by its number", "the trainer's data plan")
    if shards is None or world is None or workers is None:
        return unknown(f"{UNREPORTED}data shards, ranks or workers{BY_LOADER}")
    per_rank = max(workers, 1)
    readers = world * per_rank
    text = f"{shards} data shards for {world} ranks × {per_rank} workers = {readers} readers"
    read = f"shards {shards}, world size {world}, workers {workers}"
    remedy = f"use ≤ {shards // world} workers a rank, or reshard to ≥ {readers}"
    if is_resampled and shards > 0:
        return passes(text, read)
    if shards < world:
        return fails(f"{text}; {world - shards} ranks get nothing and the others wait for them", read, remedy)
    if shards < readers:
        return fails(f"{text}; {readers - shards} get nothing", read, remedy)
    if shards % world:
        return warns(f"{text}: ranks end unevenly", read, f"use a multiple of {world} shards, or resample")
    return passes(text, read)


def _labels(masked: tuple[float, ...]) -> CheckAnswer:
    """PF14: not all labels are masked."""
    read, share = f"{len(masked)} batches", sum(masked) / len(masked)
    if min(masked) >= 1.0:
        return fails("all labels are −100: loss will be 0", read, "look at the chat template and the response markers")
    text = f"{share:.0%} of the labels are masked"
    return warns(text, read, "look at a decoded sample") if share > MOSTLY else passes(text, read)


def _size(count: int | None, size_bytes: int | None, dataset: str | None, padding: float | None) -> CheckAnswer:
    """PF15: the data are as large as claimed, and not mostly padding."""
    if count is None and size_bytes is None:
        return unknown(f"{UNREPORTED}samples and bytes{BY_LOADER}")
    known = ["unknown" if number is None else f"{number:,}" for number in (count, size_bytes)]
    read = f"{known[0]} samples, {known[1]} bytes"
    if count is not None and count < FEW_SAMPLES:
        named = f"; the data are called {dataset}" if dataset else ""
        return warns(f"{count:,} samples{named}", read, "a model of this size memorises them")
    if padding is not None and padding > HALF:
        return warns(f"{padding:.0%} of the positions are padding", read, "pack the samples")
    return passes(read, read)


# ---- ranks -----------------------------------------------------------------------------------------------------------

def _devices(
    ranks: tuple[RankFacts, ...], sizes_seen: Mapping[str, int], claimed: int | None, plan: Mapping[str, Any]
) -> CheckAnswer:
    """PF04: as many distinct devices as requested, one rank on each, and one world size for all."""
    asked = claimed or plan.get("world_size")
    devices: dict[str, list[int]] = defaultdict(list)
    for rank in ranks:
        devices[rank.device].append(rank.rank)
    read = f"{len(ranks)} ranks reported {len(devices)} distinct devices"
    sizes = {"ranks that reported": len(ranks), **sizes_seen}
    if len(set(sizes.values())) > 1:
        said = ", ".join(f"{who}: {size}" for who, size in sizes.items())
        return fails(f"ranks disagree about the world size: {said}", read, "start it with torchrun")
    for device, numbers in devices.items():
        if len(numbers) > 1:
            found = f"{len(devices)} distinct device{'s' if len(devices) > 1 else ''}"
            text = f"asked {asked or len(ranks)}, {found}: ranks {', '.join(map(str, numbers))} all on {device}"
            return fails(text, read, "check CUDA_VISIBLE_DEVICES and device_ids")
    if asked is not None and len(devices) != asked:
        return fails(f"{asked} devices requested, {len(devices)} in use", read, "check the launcher's arguments")
    return passes(f"{len(devices)} devices, one rank each", read)


def _first_batches(ranks: tuple[RankFacts, ...]) -> CheckAnswer:
    """PF19: no two data ranks read the same first batch."""
    if len(ranks) == 1:
        return passes("one rank reads all of it", "1 rank")
    by_batch: dict[str, list[RankFacts]] = defaultdict(list)
    for rank in ranks:
        if rank.first_batch_digest is not None:
            by_batch[rank.first_batch_digest].append(rank)
    known = sum(map(len, by_batch.values()))
    if known < 2:
        return unknown("fewer than two ranks reported their first batch")
    for same in by_batch.values():
        readers = {rank.rank if rank.data_rank is None else rank.data_rank for rank in same}
        if len(readers) > 1:
            numbers = ", ".join(str(rank.rank) for rank in same)
            remedy = "split the data by rank, or give every rank its own sampler seed"
            return fails(f"ranks {numbers} read the same first batch", f"{known} digests", remedy)
    return passes(f"{len(by_batch)} different first batches", f"{known} digests")


# ---- the LR schedule -------------------------------------------------------------------------------------------------

HORIZON_TOLERANCE = 0.01


def _horizon(horizon: int, updates: int, facts: TrainerFacts) -> CheckAnswer:
    """PF11: the scheduler reaches its end when the run does."""
    per_update = facts.scheduler_steps_per_update or 1.0
    taken = updates * per_update
    read = f"horizon {horizon:,}, {updates:,} updates × {per_update:g} scheduler steps"
    if abs(taken - horizon) <= HORIZON_TOLERANCE * horizon:
        return passes(f"{taken:,.0f} of {horizon:,} scheduler steps", read)
    text = f"{facts.scheduler or 'scheduler'} horizon {horizon:,} but {taken:,.0f} scheduler steps in {updates:,} updates"
    if taken < horizon and facts.learning_rates:
        end, peak = facts.learning_rates[min(updates, len(facts.learning_rates)) - 1], max(facts.learning_rates)
        text += f": LR ends at {end / peak:.0%} of its peak" if peak > 0 else ""
    parts = facts.accumulation or 1
    if parts > 1 and abs(horizon - taken * parts) <= 0.02 * horizon:
        text += f" (accumulation {parts} was not divided out)"
    return fails(text, read, "set the horizon to the number of scheduler steps that will be taken")


# ---- saves -----------------------------------------------------------------------------------------------------------

ROOM = 1.2  # factor over the size of the checkpoints that are kept


def _disk(size_bytes: int, free_bytes: int, kept: int | None) -> CheckAnswer:
    """PF21: enough disk space for the checkpoints that are kept and the one being written."""
    needed = int(ROOM * size_bytes * ((kept or 1) + 1))
    text, read = f"{free_bytes / 1e9:.1f} GB free, {needed / 1e9:.1f} GB needed", f"checkpoint {size_bytes:,} bytes"
    if free_bytes < needed:
        return fails(text, read, "free space, or keep fewer checkpoints")
    return passes(text, read)


def _save_time(seconds: float, seconds_to_kill: float, lead_seconds: float | None) -> CheckAnswer:
    """PF23: a save takes less time than there is between a signal and the KILL that follows it."""
    text = f"save {seconds:.0f} s, killed after {seconds_to_kill:.0f} s"
    if seconds < seconds_to_kill:
        return passes(text, "a timed save")
    wanted = max(60, round(seconds * 2))
    remedy = f"chronicle run --grace {wanted}"
    if lead_seconds is not None and seconds >= lead_seconds:
        remedy += f", and a batch script that warns {wanted + 30} s ahead: `chronicle run --sbatch`"
    return fails(text, "a timed save", remedy)


# ---- the table: id, title, judge, what it cannot do without, what else it is given -----------------------------------

FACT_CHECKS: tuple[CheckRow, ...] = (
    CheckRow("PF01", "data shards for every reader", _shards, {},
          ("data_addressable", "data_resampled", "num_data_shards", "world_size", "num_workers")),
    CheckRow("PF02", "parameter count against the claim", _claimed_count,
          {"params_counted": f"{UNREPORTED}the parameter count before wrapping", "claimed_params": "no claim was given"}),
    CheckRow("PF03", "three parameter counts agree", _three_counts,
          dict.fromkeys(("params_logical", "params_counted"), f"{UNREPORTED}the formula or the parameter count"),
          ("ranks",)),
    CheckRow("PF04", "devices", _devices, {"ranks": "no rank has reported its device"},
          ("world_sizes_seen", "claimed_devices", "binding_plan")),
    CheckRow("PF05", "wrapper", _wrapper, {}, ("wrapper", "binding_plan", "world_size")),
    CheckRow("PF06", "no silent change of the plan", _plan, {"plan": "no plan was declared before this launch"},
          ("facts", "accepted_change")),
    CheckRow("PF11", "LR horizon", _horizon,
          dict.fromkeys(("scheduler_horizon", "planned_steps"),
                        f"{UNREPORTED}the scheduler's horizon or the planned updates"), ("facts",)),
    CheckRow("PF14", "labels", _labels, {"masked_fractions": "the trainer reported no collated batch"}),
    CheckRow("PF15", "data size and padding", _size, {},
          ("num_samples", "dataset_bytes", "dataset", "pad_fraction")),
    CheckRow("PF19", "every rank reads its own data", _first_batches, {}, ("ranks",)),
    CheckRow("PF21", "disk space", _disk,
          {"checkpoint_bytes": "the size of a checkpoint is unknown", "free_bytes": "the free space is unknown"},
          ("checkpoints_kept",)),
    CheckRow("PF23", "save time", _save_time,
          {"save_seconds": f"{UNREPORTED}how long a save takes", "seconds_to_kill": "the launcher's grace is unknown"},
          ("signal_lead_seconds",)),
)  # fmt: skip

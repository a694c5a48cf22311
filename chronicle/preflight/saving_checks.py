"""Checks on saving and on the experiments of `--full`: disk, save time, round trip, sanity fit. Pure.

Sources: launchers kill 30 s after a signal (measured 29.8 s), seed 003 (state that does not come back), seed 000
(K = C = S = 0.000 in every row).
"""

from __future__ import annotations

from chronicle.preflight.answers import Answer
from chronicle.preflight.expectation import Expectation
from chronicle.preflight.facts import TrainerFacts
from chronicle.preflight.results import CheckResult

__all__ = [
    "check_disk",
    "check_fit",
    "check_micro_batches",
    "check_round_trip",
    "check_save_time",
    "check_telemetry",
]

ROOM = 1.2
DIFFERENCE = 1e-3
MIN_FALL = 0.02


def check_disk(facts: TrainerFacts, expected: Expectation) -> CheckResult:
    """PF21: room for all checkpoints that are kept and the one being written."""
    answer = Answer("PF21", "disk space")
    size, free = facts.checkpoint_bytes, expected.free_bytes
    if size is None or free is None:
        return answer.unknown("the size of a checkpoint" if size is None else "free space")
    needed = int(ROOM * size * ((facts.checkpoints_kept or 1) + 1))
    text = f"{free / 1e9:.1f} GB free, {needed / 1e9:.1f} GB needed"
    if free < needed:
        return answer.failed(text, f"checkpoint {size:,} bytes", "free space, or keep fewer checkpoints")
    return answer.passed(text, f"checkpoint {size:,} bytes")


def check_save_time(facts: TrainerFacts, expected: Expectation) -> CheckResult:
    """PF23: a save fits between a signal and the KILL that follows it."""
    answer = Answer("PF23", "save time")
    limits = [seconds for seconds in (expected.grace_seconds, expected.signal_lead_seconds) if seconds is not None]
    if facts.save_seconds is None or not limits:
        return answer.unknown("how long a save takes" if facts.save_seconds is None else "the launcher's grace")
    text = f"save {facts.save_seconds:.0f} s, killed after {min(limits):.0f} s"
    if facts.save_seconds >= min(limits):
        wanted = max(60, round(facts.save_seconds * 2))
        remedy = f"chronicle run --grace {wanted}"
        if expected.signal_lead_seconds is not None and facts.save_seconds >= expected.signal_lead_seconds:
            remedy += f", and a batch script that warns {wanted + 30} s ahead: `chronicle run --sbatch`"
        return answer.failed(text, "a timed save", remedy)
    return answer.passed(text, "a timed save")


def check_round_trip(facts: TrainerFacts, expected: Expectation) -> CheckResult:
    """PF22: what is saved comes back equal in a fresh process."""
    answer = Answer("PF22", "save round trip")
    if facts.save_round_trip is None:
        return answer.unknown("needs --full")
    if facts.save_round_trip:
        return answer.failed(f"`{facts.save_round_trip}` came back different", "save, load, compare", "save all of it")
    return answer.passed("everything came back equal", "save, load, compare")


def check_fit(facts: TrainerFacts, expected: Expectation) -> CheckResult:
    """PF25: a short fit on fixed data brings the loss down, and resumed at half it goes the same way."""
    answer = Answer("PF25", "sanity fit")
    losses = facts.fit_losses
    if len(losses) < 2:
        return answer.unknown("needs --full")
    fall = (losses[0] - min(losses)) / abs(losses[0]) if losses[0] else 0.0
    read = f"{len(losses)} updates, loss {losses[0]:.4g} → {losses[-1]:.4g}"
    if fall < MIN_FALL:
        return answer.failed(f"the loss falls by {fall:.1%}", read, "check gradients, LR and labels")
    if facts.fit_resumed_equal is False:
        return answer.failed("the resumed half differs from the unbroken one", read, "state is lost at a resume")
    return answer.passed(f"the loss falls by {fall:.0%}", read)


def check_micro_batches(facts: TrainerFacts, expected: Expectation) -> CheckResult:
    """PF28: accumulation gives the loss of the whole batch."""
    answer = Answer("PF28", "micro-batch independence")
    difference = facts.micro_batch_difference
    if difference is None:
        return answer.unknown("needs --full")
    read = f"relative difference {difference:.2g}"
    if difference > DIFFERENCE:
        return answer.failed("the parts do not add up to the batch", read, "scale by tokens, not by parts")
    return answer.passed("the parts add up to the batch", read)


def check_telemetry(facts: TrainerFacts, expected: Expectation) -> CheckResult:
    """PF27: a channel that is said to measure something moves."""
    answer = Answer("PF27", "telemetry alive")
    known = {name: series for name, series in facts.telemetry.items() if len(series) > 1}
    if not known:
        return answer.unknown("no telemetry over several steps")
    dead = sorted(name for name, series in known.items() if max(series) == min(series))
    if dead:
        rows = len(known[dead[0]])
        text = "=".join(dead) + f"={known[dead[0]][0]:.3f} in {rows} of {rows} rows"
        return answer.warned(text, f"{len(known)} channels", "it measures nothing: fix it or leave it out")
    return answer.passed(f"{len(known)} channels move", f"{len(known)} channels")

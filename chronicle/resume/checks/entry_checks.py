"""What must hold where a launch enters the run: compared as it was right after the load, before training touched it. Pure.

Running statistics move with the first forward, flags and objects of the script's own when the script likes; what they
were at the load is kept, and judged before the first step.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from chronicle.resume.checks.comparing import equal
from chronicle.resume.contract import Expectation
from chronicle.resume.memory import Memory
from chronicle.resume.checks.check import Check

__all__ = ["Entry", "check_entry", "check_mode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What one rank held right after the load, or (a plain loop) when its first batch came."""

    buffers: str = ""
    frozen: str = ""
    objects: Mapping[str, str] = field(default_factory=dict)
    objects_before: Mapping[str, str] = field(default_factory=dict)  # before the load: as the script made them


def check_entry(expected: Expectation, entry: Entry, found: Memory, *, rank: int) -> Iterator[Check]:
    """`found` is memory at the first step. A flag or object may change on the way there, but not stay or become wrong."""
    memory = expected.memory
    if memory is None:
        return
    saved = memory.of_rank(rank)
    if saved is not None and saved.buffers:
        where, cause = f"saved buffers, rank {rank}", "running statistics (batch norm) were not restored"
        yield equal("buffers", "M1", saved.buffers, entry.buffers, where, cause)
    if memory.frozen and found.frozen and not expected.accepts("frozen_parameters"):
        own = memory.frozen if memory.frozen == entry.frozen else found.frozen
        where, cause = "requires_grad", "other layers are trained than before"
        yield equal("frozen parameters", "M3", memory.frozen, own, where, cause)
    for name, digest in memory.objects.items():
        own = entry.objects.get(name, "")
        if own == digest and found.objects.get(name) == entry.objects_before.get(name) is not None:
            own = found.objects[name]
        where, cause = "register_for_checkpointing", "it was not restored, or made anew after the load"
        yield equal(f"state of `{name}`", "M1", digest, own, where, cause)


def check_mode(expected: Expectation, found: Memory) -> Iterator[Check]:
    """Whether the models train as they did at the last step before the save."""
    modes = expected.memory.training if expected.memory else None
    if modes is None or found.training is None or len(modes) != len(found.training):
        return
    cause = "a validation before the first step left the model without dropout: call `model.train()`"
    yield equal("training mode", "M1", _words(modes), _words(found.training), "model.training", cause)


def _words(modes: tuple[bool, ...]) -> str:
    return ", ".join("training" if mode else "evaluation" for mode in modes)

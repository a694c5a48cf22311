"""How two values become a check, and what a comparison must know about topology. Pure."""

from collections.abc import Sequence
from typing import Any

from chronicle.resume.contract import Expectation, close
from chronicle.resume.memory import Memory
from chronicle.resume.checks.check import Check

__all__ = ["SAME", "equal", "is_sharded", "near", "other_world", "show", "text_of"]

SAME = 1e-9  # relative: the same program on the same state


def equal(name: str, code: str, expected: Any, found: Any, where: str, cause: str) -> Check:
    ok = expected == found
    return Check(
        name=name,
        code=code,
        ok=ok,
        expected=text_of(expected),
        found=text_of(found),
        where=where,
        cause="" if ok else cause,
    )


def near(name: str, expected: float, found: float | None, where: str) -> Check:
    ok = found is not None and close(expected, found, SAME)
    cause = "" if ok else f"the optimizer's `{name}` was set again after the load, or never restored"
    return Check(
        name=name, code="M1", ok=ok, expected=f"{expected:.9g}", found=text_of(found), where=where, cause=cause
    )


def other_world(expected: Expectation, found: Memory) -> bool:
    """Whether this launch runs on another number of ranks, and a person accepted that."""
    memory = expected.memory
    if memory is None or not expected.accepts("world_size"):
        return False
    return bool(memory.topology.get("world_size") != found.topology.get("world_size"))


def is_sharded(memory: Memory) -> bool:
    return len({digest.moments for digest in memory.ranks}) > 1


def show(row: Sequence[float]) -> str:
    shown = ", ".join(f"{lr:.9g}" for lr in row[:6])
    return f"{shown}, … ({len(row)} groups)" if len(row) > 6 else shown


def text_of(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 160 else text[:157] + "…"

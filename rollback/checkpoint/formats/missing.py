"""Files that a writer makes and that are not there (F2); those that it numbers from 0 are told by the gaps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set

from rollback.findings import Finding, Severity

MAX_NAMED = 32


def missing_file(name: str, what: str, path: str | None = None) -> Finding:
    """The file `name` is missing; `path` where it is not the same, `what` says what follows from it."""
    return Finding(
        check="F2",
        severity=Severity.ERROR,
        path=path or name,
        message=f"`{name}` is missing: {what}",
        remedy="go back to a complete checkpoint, or restore the file",
    )


def gaps(present: Set[int], name_of: Callable[[int], str], what: Callable[[int], str], up_to: int) -> Iterator[Finding]:
    """A finding for each of the numbers 0 … `up_to` that is not there; beyond MAX_NAMED of them one for all others.

    A file may be called after any number: the gaps are counted, never filled.
    """
    absent = (n for low, high in _between(present, up_to) for n in range(low, high))
    for _ in range(MAX_NAMED):
        number = next(absent, None)
        if number is None:
            return
        yield missing_file(name_of(number), what(number))
    others = up_to + 1 - sum(number <= up_to for number in present) - MAX_NAMED
    if others > 0:
        yield missing_file(name_of(next(absent)), f"the first of {others} more below number {up_to}")


def _between(present: Set[int], up_to: int) -> Iterator[tuple[int, int]]:
    """[low, high) of every gap below and up to `up_to`."""
    low = 0
    for number in sorted(n for n in present if n <= up_to):
        yield low, number
        low = number + 1
    yield low, up_to + 1

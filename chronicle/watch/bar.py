"""A bar on the terminal's stderr while a long log is read; rich is imported only where there is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from chronicle.watch.two_processes import is_long


@contextmanager
def progress_bar(path: Path) -> Iterator[Callable[[int], None] | None]:
    """What to tell how many points have been read; None where nobody looks or the log is short."""
    if not (sys.stderr.isatty() and is_long(path)):
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(path.name, total=count_lines(path))
        yield lambda done: progress.update(task, completed=done)


def count_lines(path: Path) -> int:
    """How many lines the file has, by the length of its first ones."""
    with open(path, "rb") as log:
        head = log.read(1 << 16)
    return max(1, path.stat().st_size * head.count(b"\n") // max(1, len(head)))

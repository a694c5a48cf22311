"""Shared by the commands that change checkpoints: asking a person, and the bar of bytes that are read."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import typer

from chronicle.errors import Declined, UsageProblem
from chronicle.goback.planning import WORTH_BYTES
from chronicle.story.plain import shown_lines
from rollback.disk.content import ByteProgress

WORTH_CHECKPOINTS = 20


def agree(question: str, lines: str | Sequence[str], *, yes: bool) -> None:
    """Show the lines and ask; raises `UsageProblem` without a terminal and `Declined` when the answer is no."""
    if yes:
        return
    print(shown_lines(lines), file=sys.stderr)
    if not sys.stdin.isatty():
        raise UsageProblem("no terminal to ask on: nothing was changed", "repeat with --yes to go on without asking")
    if not typer.confirm(question, err=True):
        raise Declined


@contextmanager
def byte_progress(total_bytes: int, checkpoints: int = 1) -> Iterator[ByteProgress | None]:
    """A function that takes the number of bytes read, and moves a bar; None where no bar is shown."""
    if (total_bytes < WORTH_BYTES and checkpoints < WORTH_CHECKPOINTS) or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress("verifying", *columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("verifying", total=total_bytes)
        yield lambda count: bar.advance(task, count)

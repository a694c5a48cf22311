"""A bar on stderr while bytes are read: only where a person watches, and only when there is something to wait for."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rollback.disk.checksums import Progress
from rollback.findings import Finding
from rollback.checkpoint.layout import Checkpoint

__all__ = ["byte_progress", "read_every_byte"]

WORTH_BYTES = 200 * 10**6
WORTH_CHECKPOINTS = 20


@contextmanager
def byte_progress(total_bytes: int, checkpoints: int = 1) -> Iterator[Progress | None]:
    """What is to be told the bytes read; None where no bar is shown."""
    if (total_bytes < WORTH_BYTES and checkpoints < WORTH_CHECKPOINTS) or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress("verifying", *columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("verifying", total=total_bytes)
        yield lambda count: bar.advance(task, count)


def read_every_byte(checkpoint: Checkpoint) -> list[Finding]:
    """Verify one checkpoint with its checksums, on all cores."""
    from concurrent.futures import ThreadPoolExecutor

    from rollback.checks.verify import verify_checkpoint

    with ThreadPoolExecutor(os.cpu_count()) as executor, byte_progress(checkpoint.size_bytes) as bar:
        return verify_checkpoint(checkpoint, full=True, executor=executor, progress=bar)

"""What a command gives back; `main.py` is the one place that renders it for people or as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

__all__ = ["CommandResult", "ExitCode"]


class ExitCode(IntEnum):
    """Documented in `docs/exit_codes.md`; `chronicle run` returns the launcher's own code instead."""

    DONE = 0
    ERROR = 1
    USAGE = 2
    REFUSED = 3
    STOPPED_PART_WAY = 4
    FINDINGS = 5
    DO_NOT_REQUEUE = 78
    CANNOT_START = 125
    INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """`text` is data for stdout, `talk` goes to stderr, `data` is what `--json` prints (one object, or a list)."""

    text: str = ""
    data: Mapping[str, Any] | Sequence[Any] | None = None
    exit_code: int = ExitCode.DONE
    talk: tuple[str, ...] = field(default=())

"""Text for terminals and pages: control characters escaped, numbers, factors, dates and durations formatted.

Control characters and marks that change the direction of writing are shown as escapes, so that they have no effect.
"""

import math
import os
import re
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NamedTuple

ON = ("1", "true", "yes")  # of CHRONICLE_UTC; a command sets it from the setting `utc`
# C0 and C1 controls, DEL, line separators, and the marks that turn the direction of writing (CVE-2021-42574)
UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


def say(text: str) -> None:
    """Tell the person who runs this command something, on stderr."""
    print(f"chronicle: {plain_block(text)}", file=sys.stderr, flush=True)


def plain(text: object) -> str:
    """One line: every control character as its escape (`\\x1b`)."""
    return UNSAFE.sub(_escape, str(text))


def plain_block(text: object) -> str:
    """Several lines: line breaks and tabs stay, everything else as in `plain`."""
    return "\n".join(map(plain, lines_of(text)))


def lines_of(text: object) -> list[str]:
    """The lines of a text, with spaces for tabs."""
    return str(text).replace("\r\n", "\n").replace("\t", "    ").split("\n")


class Coloured(NamedTuple):
    """A line whose first part has a colour on a terminal (`code`, as in `31;1`)."""

    code: str
    head: str
    rest: str = ""

    def shown(self) -> str:
        """In colour on a terminal without NO_COLOR (https://no-color.org), or with FORCE_COLOR."""
        head, rest = plain(self.head), plain(self.rest)
        return f"\x1b[{self.code}m{head}\x1b[0m{rest}" if _wants_colour() else head + rest


def _wants_colour() -> bool:
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return bool(os.environ.get("FORCE_COLOR")) or sys.stdout.isatty()


def shown_lines(lines: str | Sequence[str | Coloured]) -> str:
    """Lines as a terminal may get them: each is escaped, so that none can begin another. The line breaks of one text stay."""
    if isinstance(lines, str):
        return plain_block(lines)
    return "\n".join(line.shown() if isinstance(line, Coloured) else plain(line) for line in lines)


def _escape(match: re.Match[str]) -> str:
    code = ord(match.group())
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def format_number(value: float | None) -> str:
    """Four significant digits; `unknown` for None."""
    if value is None:
        return "unknown"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.4g}"


def align_columns(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """The rows of a table as lines, each column as wide as its widest cell. `right`: columns whose cells end together."""
    columns = []
    for at, column in enumerate(zip(*rows, strict=True)):
        width = max(map(len, column))
        columns.append([cell.rjust(width) if at in right else cell.ljust(width) for cell in column])
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]


def format_size(size_bytes: int) -> str:
    """Bytes in decimal units: `37 B`, `1.9 kB`, `2.5 TB`."""
    size = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def format_factor(factor: float | None) -> str:
    """`×0.375`; `×?` for an unknown factor."""
    return "×?" if factor is None else f"×{factor:.6g}"


def format_when(ts: str) -> str:
    """`2026-05-18 14:25 +02:00` in the reader's time zone, or in UTC (`CHRONICLE_UTC`); other text is returned as it is.

    A time without an offset is shown without one.
    """
    try:
        moment = datetime.fromisoformat(ts)
        if moment.tzinfo is None:
            return moment.strftime("%Y-%m-%d %H:%M")
        moment = moment.astimezone(UTC if os.environ.get("CHRONICLE_UTC", "") in ON else None)
    except (ValueError, OverflowError, OSError):
        return plain(ts)
    offset = moment.strftime("%z")
    return f"{moment:%Y-%m-%d %H:%M} {offset[:3]}:{offset[3:5]}"


def format_seconds(seconds: float) -> str:
    """A short duration with two digits; a longer one as `format_age`."""
    return f"{seconds:.2g} s" if seconds < 9.5 else format_age(seconds)


def format_age(seconds: float) -> str:
    """A duration in its two largest units."""
    seconds = max(0, round(seconds))
    for unit, size, smaller, small in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if seconds >= size:
            rest = seconds % size // small
            return f"{seconds // size} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{seconds} s"

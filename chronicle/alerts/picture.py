"""The picture of an alert: the loss around an incident as a small PNG, drawn without any library.

A person who is woken wants to see the curve before the command. It is drawn where the alert is sent, which may be a machine
without matplotlib, in milliseconds. There is no font in it: what the axes are is said in `caption`, in words beside it.
"""

import math
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from chronicle.alerts.messages import Alert
from chronicle.metrics.log import parse_line
from chronicle.paths import RunPaths
from rollback.channels import Role, find_channel

WIDTH, HEIGHT, MARGIN = 640, 240, 12  # pixels
MOST_READ = 8 << 20  # bytes from the end of the log: about 100,000 lines
BEFORE, LEAST = 400, 2  # steps before the onset; points
LOG_FROM = 1_000.0  # highest to lowest, from where the axis is logarithmic
PAPER, GRID, INK, ALARM = range(4)
PALETTE = bytes((255, 255, 255, 225, 228, 232, 43, 108, 176, 208, 69, 63))


class Picture(NamedTuple):
    """A PNG and what it shows: `loss, steps 80 to 160, 2.01 to 9.8 (log axis); red: step 120`."""

    png: bytes
    caption: str


def picture_of(paths: RunPaths, alert: Alert) -> Picture | None:
    """The loss of the alert's launch from some steps before its onset to the newest point; None where it has none."""
    if alert.launch is None:
        return None
    steps, values, name = _read(paths.metrics_path(alert.launch), (alert.step or 0) - BEFORE)
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < LEAST:
        return None
    is_log = min(finite) > 0 and max(finite) > LOG_FROM * min(finite)
    png = draw_curve(steps, values, mark=alert.step, log=is_log)
    caption = f"{name}, steps {steps[0]} to {steps[-1]}, {min(finite):.4g} to {max(finite):.4g}"
    caption += " (log axis)" if is_log else ""
    return Picture(png, caption if alert.step is None else f"{caption}; red: step {alert.step}")


def draw_curve(steps: Sequence[int], values: Sequence[float], *, mark: int | None, log: bool) -> bytes:
    """A PNG of 640 × 240 pixels: in each column the lowest to the highest value, joined to the column before.

    `values` has at least one finite one; others are gaps. `mark`: the step of a red line.
    """
    rows = [bytearray([PAPER]) * WIDTH for _ in range(HEIGHT)]
    seen = [math.log10(v) if log else v for v in values if math.isfinite(v) and (v > 0 or not log)]
    low, high = min(seen), max(seen)
    spread, length = (high - low) or 1.0, (steps[-1] - steps[0]) or 1
    wide, tall = WIDTH - 2 * MARGIN, HEIGHT - 2 * MARGIN

    def column(step: int) -> int:
        return MARGIN + round((step - steps[0]) / length * (wide - 1))

    for part in range(5):
        for x in range(MARGIN, WIDTH - MARGIN):
            rows[MARGIN + round(part / 4 * (tall - 1))][x] = GRID
    if mark is not None and steps[0] <= mark <= steps[-1]:
        for row in rows:  # also above and below the curve, which may jump just there
            row[column(mark)] = ALARM
    before: int | None = None
    columns: dict[int, list[int]] = {}
    for step, value in zip(steps, values, strict=True):
        if math.isfinite(value) and (value > 0 or not log):
            at = ((math.log10(value) if log else value) - low) / spread
            columns.setdefault(column(step), []).append(MARGIN + round((1 - at) * (tall - 1)))
    for x, heights in sorted(columns.items()):
        top, bottom = min(heights), max(heights)
        if before is not None:
            top, bottom = min(top, before), max(bottom, before)
        for y in range(top, bottom + 1):
            rows[y][x] = INK
            rows[min(y + 1, HEIGHT - 1)][x] = INK
        before = heights[-1]
    return _png(rows)


def _png(rows: Sequence[bytearray]) -> bytes:
    """Eight bits a pixel with a palette (PNG specification, third edition, 11.2)."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", len(rows[0]), len(rows), 8, 3, 0, 0, 0)
    body = zlib.compress(b"".join(b"\0" + bytes(row) for row in rows), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"PLTE", PALETTE) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def _read(path: Path, first: int) -> tuple[list[int], list[float], str]:
    """Steps and loss of the end of a log, from the step `first` on, and the channel's name."""
    try:
        with open(path, "rb") as log:
            size = os.fstat(log.fileno()).st_size
            log.seek(max(0, size - MOST_READ))
            lines = log.read(MOST_READ).split(b"\n")[1 if size > MOST_READ else 0 : -1]
    except OSError:
        return [], [], ""
    points = [point for line in lines if (point := parse_line(line)) is not None and point.step >= first]
    name = find_channel({name for point in points for name in point.values}, Role.LOSS)
    found = [(point.step, point.values[name]) for point in points if name in point.values] if name is not None else []
    found = sorted(dict(found).items())
    return [step for step, _ in found], [value for _, value in found], name or ""

"""Forms of printed logs that are no lines of named numbers, tables and bars: a reader for each, first match wins.

A reader is a class with `feed(line)`: it returns a `Found` where it knows the line (`values` empty where that holds no
point), else None. `PrintedLines` asks `FORMS` in this order before it takes a line apart by itself. A new form is a
class to copy, its name in `FORMS`, and a sample in `tests/metrics/dialects.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from chronicle.metrics.counters import EpochSteps
from chronicle.metrics.numbers import NUMBER, number_in, number_of_text
from chronicle.metrics.records import point_of_record
from chronicle.metrics.shapes import fields_in
from rollback.channels import JUDGED, STEP_NAMES, Role, role_of


class Found(NamedTuple):
    """A line that a form knows: its step and its values by their own names; none where the line holds no point."""

    step: int = 0
    values: Mapping[str, float] = {}


class Form(Protocol):
    """One form of a printed log, line by line."""

    def feed(self, line: str) -> Found | None:
        """Return what this line holds; None where it is not of this form."""


NOTHING = Found()


def found_in(record: Mapping[str, Any], epochs: EpochSteps) -> Found | None:
    """What a record holds by known names; None where it names no step."""
    point = point_of_record(record, epochs, texts=True)
    if point is None:
        return None
    return Found(point.step, {name: value for name, value in point.values.items() if role_of(name) is not Role.IGNORED})


class TextTable:
    """A table with its names in the first row: in columns of blanks (fastai, spaCy, YOLO) or of bars (Rich, Markdown).

    It is open from its head on; any line that is no row is left to the other readers.
    """

    BARS = re.compile(r"[|│┃]")
    BLANKS = re.compile(r"\s{2,}|\t")
    WORD = re.compile(r"[A-Za-z_][\w./-]*")
    DRAWN = re.compile(r"(\d+)%\|")  # a bar, drawn again and again until it is full

    def __init__(self) -> None:
        self.names: list[str] = []
        self.epochs = EpochSteps()

    def feed(self, line: str) -> Found | None:
        """Read a row of the open table, or its head."""
        if self.names:
            row = self._row(line)
            if row is not None:
                return row
        names = self._head(line)
        if names:
            self.names = names
            return NOTHING
        return None

    def _cells(self, line: str) -> list[str] | None:
        """The cells between bars; None where the line does not stand between two."""
        plain = line.strip()
        if len(plain) < 3 or not self.BARS.match(plain[0]) or not self.BARS.match(plain[-1]):
            return None
        return [cell.strip() for cell in self.BARS.split(plain[1:-1])]

    def _head(self, line: str) -> list[str]:
        """The names of a head, a loss and a counter among them; none where it is no head."""
        if ":" in line or "=" in line:
            return []
        barred = self._cells(line)
        if barred is None and "|" in line:
            return []
        names = barred or [name for name in self.BLANKS.split(line.strip()) if name]
        words = line.removeprefix("#").split()  # `# step loss`, as `numpy.savetxt` writes it
        single = len(names) < 2 <= len(words) <= 40 and all(self.WORD.fullmatch(word) for word in words)
        if single and words[0].lower() in STEP_NAMES and any(role_of(word) is Role.LOSS for word in words):
            names = words
        if len(names) < 2 or (len(names) < 3 and names != words and barred is None and "\t" not in line):
            return []
        if any(number_in(name) is not None for name in names):
            return []
        names = ["step" if name == "#" else name for name in names]
        counted = any(name.lower() in STEP_NAMES for name in names[:3])
        judged = any(role_of(name) in JUDGED for name in names)
        return names if counted and judged else []

    def _row(self, line: str) -> Found | None:
        cells = self._cells(line) or line.split()
        bar = self.DRAWN.search(line)
        if bar is not None and bar[1] != "100":
            return None
        if len(cells) < len(self.names) or (bar is None and len(cells) > len(self.names)):
            return None
        return found_in(dict(zip(self.names, cells, strict=False)), self.epochs)


class FramedTable:
    """A table between two lines of dashes, a name and a number in each row: Stable-Baselines3, ADM."""

    FRAME = re.compile(r"^\s*[-+=]{8,}\s*$")
    CELL = re.compile(rf"^\s*\|\s*(?P<name>[^|]*?)\s*\|\s*(?P<value>{NUMBER})?(?P<unit>[KMBT])?\s*\|\s*$", re.IGNORECASE)

    def __init__(self) -> None:
        self.epochs = EpochSteps()
        self.cells: dict[str, float] | None = None  # None: no frame is open
        self.folder = ""

    def feed(self, line: str) -> Found | None:
        """Read a row of the open frame; the frame's end gives the point."""
        if self.FRAME.match(line):
            cells, self.cells, self.folder = self.cells, {}, ""
            return found_in(cells or {}, self.epochs) or NOTHING
        if self.cells is None:
            return None
        cell = self.CELL.match(line)
        if cell is None:
            return None
        if cell["value"] is not None:
            self.cells[f"{self.folder}{cell['name']}"] = number_of_text(cell["value"], cell["unit"])
        elif cell["name"].endswith("/"):
            self.folder = cell["name"]
        return NOTHING

class Keras:
    """`Epoch 3/10`, and below it a bar that is drawn until it is full: only then it holds the means of the epoch."""

    EPOCH = re.compile(r"^Epoch (\d+)/\d+\s*$")
    BAR = re.compile(r"^\s*\d+/(?:\d+|Unknown)\s")
    END = re.compile(r"^\s*(\d+)/\1 .*?- loss: |^\s*(\d+)/\2 .*?\d+\S*/step - ")

    def __init__(self) -> None:
        self.epoch = 0

    def feed(self, line: str) -> Found | None:
        """Read a bar; the line of the epoch is left to the other readers too."""
        epoch = self.EPOCH.match(line)
        if epoch is not None:
            self.epoch = int(epoch[1])
        if not self.epoch or not self.BAR.match(line):
            return None
        return Found(self.epoch, fields_in(line)) if self.END.match(line) else NOTHING


class Column:
    """`120  train  0.53`: the step, the word and the loss, and nothing else (build-nanogpt)."""

    ROW = re.compile(rf"^(?P<at>\d+)\s+train\s+(?P<value>{NUMBER})\s*$")

    def feed(self, line: str) -> Found | None:
        """Read a row."""
        row = self.ROW.match(line) if " train " in line or "\ttrain" in line else None
        return None if row is None else Found(int(row["at"]), {"loss": number_of_text(row["value"], None)})


FORMS: tuple[type[Form], ...] = (FramedTable, TextTable, Keras, Column)

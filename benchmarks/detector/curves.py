"""Labelled curves: series with events, from a folder of CSV files with `labels.json` beside them.

Labels are one person's eye. Rows identify events because steps repeat after a rewind; `dont_care` zones (steps) count
neither way. Files of one family (same submission and workload, same test case, same record) are not independent, so
the halves A and B are split by family.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from chronicle.metrics.readers import read_log


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """One labelled event; `end_row` is where it was over, None when it never was."""

    kind: str
    onset_row: int
    peak_row: int | None = None
    end_row: int | None = None
    major: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A series and what is known about it. `values` holds one mapping a row; a missing channel was not recorded."""

    name: str
    family: str
    steps: tuple[int, ...]
    values: tuple[Mapping[str, float], ...]
    launches: tuple[int | None, ...]
    labels: tuple[Label, ...] = ()
    dont_care: tuple[tuple[int, int], ...] = ()
    target: tuple[int, int] | None = None  # a good rollback target lies in here, both ends included
    notes: str = ""
    checkpoints: tuple[int, ...] = field(default=())

    @property
    def half(self) -> str:
        """A or B, by family."""
        return "AB"[zlib.crc32(self.family.encode()) & 1]


def read_curves(root: Path) -> Iterator[Curve]:
    """Yield every labelled curve below `root`, in name order."""
    for labels_path in sorted(root.glob("*/labels.json")):
        labels = json.loads(labels_path.read_text(encoding="utf-8"))
        for name, label in sorted(labels.items()):
            path = labels_path.parent / name
            if path.is_file():
                yield read_curve(path, label)


def read_curve(path: Path, label: Mapping[str, object]) -> Curve:
    """Read one file with its label."""
    points = list(read_log(path))
    events = label.get("events") or []
    zones = label.get("dont_care") or []
    assert isinstance(events, list) and isinstance(zones, list)
    return Curve(
        name=path.stem, family=family_of(path),
        steps=tuple(point.step for point in points), launches=tuple(point.launch for point in points),
        values=tuple({k: v for k, v in point.values.items() if k not in ("loss_lo", "loss_hi")} for point in points),
        labels=tuple(_label(event) for event in events), dont_care=tuple((int(a), int(b)) for a, b in zones),
        notes=str(label.get("notes", "")),
    )  # fmt: skip


def _label(event: Mapping[str, object]) -> Label:
    def row(name: str) -> int | None:
        value = event.get(name)
        return value if isinstance(value, int) else None

    return Label(
        kind=str(event["kind"]), onset_row=row("onset_row") or 0, peak_row=row("peak_row"),
        end_row=row("recovered_row"), major=event.get("severity") != "minor",
    )  # fmt: skip


def family_of(path: Path) -> str:
    """Folder plus what makes its files depend on each other."""
    folder, stem = path.parent.name, path.stem
    if folder == "algoperf":
        parts = stem.split("__")
        return f"algoperf/{parts[2]}/{parts[4]}"
    if folder == "megatron_golden":
        return f"megatron_golden/{stem.split('__')[0]}"
    if folder == "modded_nanogpt":
        return f"modded_nanogpt/{re.sub(r'_[0-9a-f]{8}$', '', stem)}"
    return folder

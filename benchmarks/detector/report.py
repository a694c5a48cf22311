"""Tables of the detector benchmark: recall with intervals, delay, onset, false alarms, proposals, rules beside it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.detector.scoring import Found, Score
from benchmarks.detector.statistics import format_share, quantile
from rollback.detect import Tier

Row = dict[str, Any]

LABELLED = (
    ("instant spikes, major, ≥ 32 points before", {"kinds": ("instant-spike",), "major": True, "history": True}),
    ("instant spikes, all major", {"kinds": ("instant-spike",), "major": True}),
    ("instant spikes, minor", {"kinds": ("instant-spike",), "major": False}),
    ("NaN", {"kinds": ("nan",)}),
    ("level shifts", {"kinds": ("level-shift",)}),
    ("gradual divergences", {"kinds": ("gradual-divergence",)}),
    ("lr-bug, warn or above", {"kinds": ("lr-bug",)}),
    ("restart-rewind", {"kinds": ("restart-rewind",)}),
    ("resume bumps", {"kinds": ("resume-bump",)}),
)


def recall_rows(score: Score) -> list[Row]:
    """One row a group of labels: all, and each half of the families apart."""
    rows = []
    for title, wanted in LABELLED:
        found = score.select(**wanted)  # type: ignore[arg-type]
        row: Row = {"labels": title, "all": share(found)}
        for half in "AB":
            row[half] = share([item for item in found if item.curve.half == half])
        row["delay p50/p90"] = delays(found)
        row["missed"] = ", ".join(f"{item.curve.name[-28:]}@{item.label.onset_row}" for item in found if item.alarm is None)
        rows.append(row)
    return rows


def share(found: Sequence[Found]) -> str:
    return format_share(sum(item.alarm is not None for item in found), len(found))


def delays(found: Iterable[Found]) -> str:
    """Points from the onset to the alarm, of those seen."""
    rows = [item.alarm.row - item.label.onset_row for item in found if item.alarm is not None]
    return f"{quantile(rows, 0.5)}/{quantile(rows, 0.9)}" if rows else ""


def onset_row(score: Score, title: str) -> Row:
    """Error of the estimate and share of bounds that lie before the truth (one point of tolerance for the eye)."""
    pairs = [
        (item.alarm.event, item.label.onset_row) for item in score.found
        if item.alarm is not None and item.alarm.event is not None and item.label.kind != "lr-bug"
    ]  # fmt: skip
    errors = [abs((event.onset_row or 0) - truth) for event, truth in pairs]
    early = sum((event.onset_low_row or 0) <= truth + 1 for event, truth in pairs)
    return {
        "over": title, "n": len(pairs), "|onset error| p50": quantile(errors, 0.5), "p90": quantile(errors, 0.9),
        "bound before onset": format_share(early, len(pairs)),
    }  # fmt: skip


def alarm_row(score: Score, title: str) -> Row:
    """False alarms by tier."""
    per = 10_000 / max(1, score.healthy_points)
    row: Row = {"over": title, "healthy points": score.healthy_points}
    row["all"] = f"{score.false_count() * per:.2f}"
    for tier in Tier:
        row[tier.value] = f"{score.false_count(tier) * per:.3f}"
    row["µs a point and channel"] = f"{1e6 * score.cpu_seconds / max(1, score.channel_points):.2f}"
    return row


def proposal_row(score: Score, title: str) -> Row:
    """How many targets lie before the first onset, and how far before (waste, steps)."""
    pairs = [(curve.steps[curve.labels[0].onset_row], p.target_step) for curve, p in score.proposals if curve.labels]
    wastes = [onset - target for onset, target in pairs if target is not None]
    before = sum(target is not None and target < onset for onset, target in pairs)
    return {
        "over": title, "proposals": len(score.proposals), "target before onset": format_share(before, len(pairs)),
        "waste p50": quantile(wastes, 0.5), "waste p90": quantile(wastes, 0.9),
    }  # fmt: skip


def format_table(title: str, rows: Sequence[Row]) -> str:
    """A Markdown table; columns are those of the first row."""
    names = list(rows[0])
    cells = [[str("" if row.get(name) is None else row[name]) for name in names] for row in rows]
    widths = [max(len(name), *(len(line[i]) for line in cells)) for i, name in enumerate(names)]
    out = [f"\n### {title}\n", "| " + " | ".join(n.ljust(w) for n, w in zip(names, widths, strict=True)) + " |"]
    out.append("|" + "|".join("-" * (w + 2) for w in widths) + "|")
    out += ["| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in cells]
    return "\n".join(out)

"""The index of many runs as one HTML page: what is running, what is open, where each loss is. No script draws anything.

`render_index` makes the page; `write_site` writes it with a page of each run beside it and the files that notes attach, for
a web server or a mail. Nothing is loaded from elsewhere. A sparkline is the loss of the lineage, each step
once, between its 1st and 99th percentile.
"""

import math
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from chronicle.errors import ChronicleError
from chronicle.paths import RunPaths
from chronicle.report.markup import Raw, fill, html_table, html_text, own_file, write_page
from chronicle.runs import list_runs, summarize_run
from chronicle.story.curve import canonical_rows
from chronicle.story.plain import format_age, format_number, format_size
from chronicle.story.read import read_story
from rollback.channels import Role, canonical_of, find_channel

AGAIN_SECONDS = 30
MOST_ATTACHED = 50_000_000  # bytes of a file that a site takes along
ATTACHED = re.compile(r'<a href="objects/[0-9a-f]{2}/([0-9a-f]{64})">([^<]*)</a>')
WIDTH, HEIGHT, BUCKETS = 160, 30, 80
VALUES = (canonical_of(Role.LOSS), canonical_of(Role.LR))
HEADS = ("run", "state", "step", VALUES[0], "", VALUES[1].upper(), "launches", "steps abandoned", "open", "last sign", "tags")
NUMERIC = (2, 3, 5, 6, 7, 8)
BROKEN = ("failed", "unreadable", "crash", "hang", "out of memory", "node lost", "disk full", "refused")  # of the word `status`


def render_index(
    found: Sequence[tuple[Mapping[str, Any], str]],
    link: Callable[[str], str],
    *,
    now: float,
    again_seconds: int | None = None,
) -> str:
    """The page. `found`: rows as of `chronicle runs`, each with its line; `link(name)` is where a run's page lies.

    `again_seconds`: a served page is loaded again after so long.
    """
    shown = [(row, spark) for row, spark in found if not row.get("archived")]
    shown.sort(key=lambda one: (one[0]["status"] != "running", not one[0].get("incidents"), -_sign(one[0]), one[0]["name"]))
    running = sum(row["status"] == "running" for row, _ in shown)
    opened = sum(bool(row.get("incidents")) for row, _ in shown)
    facts = [("runs", len(shown)), ("running", running), ("with open incidents", opened)]
    facts += [("archived, not shown", len(found) - len(shown))] if len(found) > len(shown) else []
    head = "".join(f"<li><b>{value}</b><span>{name}</span></li>" for name, value in facts)
    cells = [_row(row, spark, link, now) for row, spark in shown]
    parts = {
        "AGAIN": "" if again_seconds is None else f'<meta http-equiv="refresh" content="{again_seconds}">',
        "CSS": own_file("page.css"),
        "HEAD": f'<ul class="facts">{head}</ul>',
        "TABLE": html_table(HEADS, cells or [["No run yet."]], numeric=NUMERIC).replace("<table>", '<table id="runs">', 1),
    }
    return fill("page_index.html", parts)


def _row(row: Mapping[str, Any], spark: str, link: Callable[[str], str], now: float) -> list[object]:
    name, status = str(row["name"]), str(row["status"])
    tone = "live" if status == "running" else "bad" if status in BROKEN else ""
    title = f' title="{html_text(row["problem"])}"' if row.get("problem") else ""
    linked = html_text(name) if row.get("problem") else f'<a href="{html_text(link(name))}">{html_text(name)}</a>'
    sign = _sign(row)
    age = f"{format_age(max(0.0, now - sign))} ago" if sign else ""
    return [
        Raw(linked),
        Raw(f'<span class="state {tone}"{title}>{html_text(status)}</span>'),
        row.get("step"),
        format_number(row.get(VALUES[0])),
        Raw(spark),
        format_number(row.get(VALUES[1])),
        row.get("launches"),
        row.get("abandoned") or None,
        row.get("incidents") or None,
        "now" if sign and tone == "live" else age,
        ", ".join(map(str, row.get("tags") or ())),
    ]


def _sign(row: Mapping[str, Any]) -> float:
    """Seconds since the epoch of the end, else of the start; 0 where neither is known."""
    for name in ("ended", "started"):
        try:
            return datetime.fromisoformat(str(row.get(name))).timestamp()
        except ValueError:
            continue
    return 0.0


def loss_line(paths: RunPaths) -> str:
    """The loss of the lineage as inline SVG, each step once; "" where none was logged."""
    story = read_story(paths, signs_of_life=False)
    values: list[float] = []
    name: str | None = None
    for row in canonical_rows(paths, story.lineage):
        if "train_runtime" in row.values:  # Trainer's last record: the mean of the run
            continue
        if name is None or name not in row.values:
            name = find_channel(row.values, Role.LOSS)
        if name is not None:
            values.append(row.values[name])
    return _drawn(values)


def _drawn(values: Sequence[float]) -> str:
    finite = sorted(value for value in values if math.isfinite(value))
    if len(finite) < 2:
        return ""
    low, high = finite[len(finite) // 100], finite[-1 - len(finite) // 100]
    span = (high - low) or 1.0
    count = min(BUCKETS, len(values))
    places = []
    for bucket in range(count):
        begin, end = bucket * len(values) // count, (bucket + 1) * len(values) // count
        part = sorted(value for value in values[begin:end] if math.isfinite(value))
        if part:
            share = min(1.0, max(0.0, (part[len(part) // 2] - low) / span))
            places.append(f"{bucket * WIDTH / max(1, count - 1):.0f} {1 + (HEIGHT - 2) * (1 - share):.1f}")
    label = f"loss from {format_number(values[0])} to {format_number(values[-1])}, {len(values)} points"
    line = f'<path d="M{" L".join(places)}"/>'
    return f'<svg class="spark" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html_text(label)}">{line}</svg>'


class ServedIndex:
    """The index that `chronicle serve` gives: a line is drawn again only when its run has grown."""

    def __init__(self, logs: Path, mark: Callable[[RunPaths], str]) -> None:
        self._logs, self._mark = logs, mark
        self._known: dict[str, tuple[str, str]] = {}  # run -> its mark and its line
        self._lock = threading.Lock()

    def runs(self) -> list[RunPaths]:
        """The runs of the directory as they are now."""
        return list_runs(self._logs)

    def page(self) -> str:
        """The index as it is now."""
        with self._lock:
            found = [_look(paths, self._line) for paths in self.runs()]
        return render_index(found, lambda run: f"runs/{quote(run)}/", now=time.time(), again_seconds=AGAIN_SECONDS)

    def _line(self, paths: RunPaths) -> str:
        mark = self._mark(paths)
        if self._known.get(paths.run, ("",))[0] != mark:
            self._known[paths.run] = (mark, loss_line(paths))
        return self._known[paths.run][1]


def _look(paths: RunPaths, line: Callable[[RunPaths], str]) -> tuple[dict[str, Any], str]:
    """The row of a run and its line; a run that cannot be read is a row that says why."""
    try:
        return summarize_run(paths), line(paths)
    except (ChronicleError, OSError, ValueError) as problem:
        return {"name": paths.run, "status": "unreadable", "problem": str(problem), "tags": []}, ""


def write_site(logs: Path, out: Path, *, page: Callable[[RunPaths], str]) -> list[dict[str, Any]]:
    """Write `index.html`, `runs/NAME.html` for each run of `logs`, and what these pages attach, into `out`; return the rows.

    `page(paths)` makes a run's page. A run that cannot be read is a row without a page.
    """

    def written(paths: RunPaths) -> str:
        line = loss_line(paths)
        write_page(out / "runs" / f"{paths.run}.html", _with_attachments(page(paths), paths, out / "runs"))
        return line

    found = [_look(paths, written) for paths in list_runs(logs)]
    write_page(out / "index.html", render_index(found, lambda run: f"runs/{quote(run)}.html", now=time.time()))
    return [row for row, _ in found]


def _with_attachments(page: str, paths: RunPaths, beside: Path) -> str:
    """The page, with each attachment that it links to copied beside it; a link to one that is gone or large becomes text."""

    def copied(link: re.Match[str]) -> str:
        stored = paths.object_path(link[1])
        target = beside / "objects" / link[1][:2] / link[1]
        try:
            if stored.stat().st_size > MOST_ATTACHED:
                return f"{link[2]} (not on this site: {format_size(stored.stat().st_size)})"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(stored.read_bytes())
        except FileNotFoundError:
            return f"{link[2]} (missing)"
        return f'<a download="{link[2]}" href="objects/{link[1][:2]}/{link[1]}">{link[2]}</a>'

    return ATTACHED.sub(copied, page)

"""`make scoreboard`: play the sections, two at a time, write one JSON and one page, say what changed.

    python -m benchmarks.scoreboard [--out build/scoreboard] [--against FILE] [--only NAME …]

`--out NAME` writes NAME.json and NAME.md. With `--against FILE` it prints the rows that differ from that JSON, and ends with 5
when there are any; only sections that were played are compared. A section that fails, or does not end within its limit, has
one row, `section`, that says so.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.scoreboard.sections import ROOT, SECTIONS, differences
from benchmarks.scoreboard.stored import lines_that_differ

AT_ONCE = 2
MOST_LINES = 12  # of an output that differs
ALONE = ("size", "guard-cost")  # played first: they measure, or take a moment


def main() -> int:
    """Play, write, compare."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scoreboard", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "scoreboard", help="without suffix [build/scoreboard]")
    parser.add_argument("--against", type=Path, help="an earlier JSON: print what changed, exit 5 when something did")
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS), help="some sections")
    asked = parser.parse_args()
    begun = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        found = list(pool.map(play, [name for name in asked.only if name in ALONE]))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found += list(pool.map(play, [name for name in asked.only if name not in ALONE]))
    record: dict[str, Any] = {"version": 1, "commit": commit(), "seconds": round(time.monotonic() - begun), "texts": {}}
    record["sections"] = {name: {"seconds": seconds, "rows": rows} for name, seconds, rows, _ in found}
    for *_, texts in found:
        record["texts"] |= texts
    text = json.dumps(record, indent=1, ensure_ascii=False, sort_keys=True)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.with_suffix(".json").write_text(text + "\n", encoding="utf-8")
    asked.out.with_suffix(".md").write_text(page(record), encoding="utf-8")
    print(f"{asked.out}.json and {asked.out}.md after {record['seconds']} s")
    if asked.against is None:
        return 0
    lines = changes(json.loads(asked.against.read_text(encoding="utf-8")), record)
    print("\n".join(lines) if lines else "nothing changed")
    return 5 if lines else 0


def play(name: str) -> tuple[str, int, dict[str, Any], dict[str, str]]:
    """(name, seconds, rows, texts) of one section, in a process of its own."""
    begun = time.monotonic()
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        command = [sys.executable, "-m", "benchmarks.scoreboard.sections", name, str(path)]
        with open(Path(folder) / "said.txt", "w+", encoding="utf-8") as said:
            started = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=said, stderr=said, start_new_session=True)
            why = ""
            try:
                started.wait(SECTIONS[name].limit_seconds)
            except subprocess.TimeoutExpired:
                os.killpg(started.pid, 9)
                started.wait()
                why = f"could not run: no end within {SECTIONS[name].limit_seconds:g} s"
            said.seek(0)
            last = said.read().strip().splitlines()[-1:]
        seconds = round(time.monotonic() - begun)
        print(f"{name}: {seconds} s", file=sys.stderr, flush=True)
        if path.exists() and not why:
            found = json.loads(path.read_text(encoding="utf-8"))
            return name, seconds, found["rows"], found["texts"]
    why = why or f"could not run: exit {started.returncode}: {' '.join(last)[:200]}"
    return name, seconds, {"section": why}, {}


def commit() -> str:
    """The commit that is checked out, and whether anything is changed."""
    words = ["git", "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One line a row that differs; below it, for an output, the lines that are not in both."""
    lines = []
    for name, section in now["sections"].items():
        earlier = before["sections"].get(name, {"rows": {}})["rows"]
        for row, one, other in differences(earlier, section["rows"], name):
            lines.append(f"{name}: {row}: {one} → {other}")
            texts = [before["texts"].get(str(one)[-10:]), now["texts"].get(str(other)[-10:])]
            if texts[0] is not None and texts[1] is not None:
                differing = list(lines_that_differ(*texts))
                lines += [f"    {line[:200]}" for line in differing[:MOST_LINES]]
    return lines


def page(record: Mapping[str, Any]) -> str:
    """The figures as Markdown: a table of the sections, then what each says, equal rows of words counted."""
    text = f"# Scoreboard of {record['commit']}\n\n{record['seconds']} s in all.\n\n| section | rows | seconds | what it is |\n"
    text += "|---|---|---|---|\n"
    for name, section in record["sections"].items():
        text += f"| {name} | {len(section['rows'])} | {section['seconds']} | {SECTIONS[name].meaning} |\n"
    for name, section in record["sections"].items():
        text += f"\n## {name}\n\n" + "\n".join(f"- {line}" for line in told(name, section["rows"])) + "\n"
    return text


def told(name: str, rows: Mapping[str, Any]) -> Sequence[str]:
    """What the rows of a section come to, in few lines."""
    if name == "verbs":
        codes = Counter(str(value).partition(",")[0] for value in rows.values())
        return [f"{count} × {code}" for code, count in sorted(codes.items())]
    if name in ("size", "detector"):
        groups: dict[str, list[str]] = {}
        for row, value in rows.items():
            group, _, figure = row.rpartition(": ")
            groups.setdefault(group, []).append(f"{figure} {value}")
        return [f"{group}: {', '.join(figures)}" for group, figures in groups.items()]
    if len(rows) <= 20:
        return [f"{row}: {value}" for row, value in rows.items()]
    counts = Counter(str(value) for value in rows.values())
    usual = {value for value, count in counts.items() if count > 2}
    return [
        *(f"{counts[value]} × {value}" for value in sorted(usual)),
        *(f"{row}: {value}" for row, value in rows.items() if str(value) not in usual),
    ]


if __name__ == "__main__":
    sys.exit(main())

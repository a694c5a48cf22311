"""`make bench-detector`: every table of the detector benchmark on standard output, all numbers from this very run.

    python -m benchmarks.detector [--curves DIR] [--count 20] [--json FILE] [--quick]

The labelled curves are used where they are (`--curves`, or `../shared/data/curves` beside the checkout) and said to be
missing where they are not; the generator and the events of the seed's run need nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.detector.curves import Curve, read_curves
from benchmarks.detector.generate import MAKERS, generate
from benchmarks.detector.golden import GOLDEN, is_right, judge
from benchmarks.detector.report import alarm_row, format_table, onset_row, proposal_row, recall_rows, share
from benchmarks.detector.rules import RULES
from benchmarks.detector.scoring import Score, merge_rows, run_detector, score_curve, spread_rows
from benchmarks.detector.statistics import format_share, quantile

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_CURVES = ROOT.parent / "shared" / "data" / "curves"
M4_GOLDEN = {  # the files present of the 80B run: (target, checkpoint interval), None: nothing may be proposed
    "exp1_spikes_2023-05-26": 14_500, "exp3_diverge_2023-05-28": 16_250, "exp7_diverge_2023-06-03": 25_000,
    "exp01_resume_spikes_1200_1600": None, "spike_recover_2023-05-30": None,
}  # fmt: skip
INTERVAL = 250


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    results: dict[str, Any] = {}
    curves = list(read_curves(options.curves)) if options.curves.is_dir() else []
    if curves:
        _labelled(curves, results, quick=options.quick)
    else:
        print(f"no labelled curves in `{options.curves}`: only what the generator gives", file=sys.stderr)
    _generated(options.count, results)
    _golden(2 if options.quick else 10, results)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.detector", description=__doc__)
    parser.add_argument("--curves", type=Path, default=DEFAULT_CURVES)
    parser.add_argument("--count", type=int, default=20, help="series of each generated class")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="leave out the other tools' rules")
    return parser.parse_args(arguments)


def _show(results: dict[str, Any], key: str, title: str, rows: list[dict[str, Any]]) -> None:
    results[key] = rows
    print(format_table(title, rows), flush=True)


def _labelled(curves: Sequence[Curve], results: dict[str, Any], *, quick: bool) -> None:
    score = Score()
    for number, curve in enumerate(curves, 1):
        _progress("labelled curves", number, len(curves))
        score_curve(curve, run_detector(curve, score), score)
    points = sum(len(curve.steps) for curve in curves)
    families = len({curve.family for curve in curves})
    title = f"Labelled curves: {len(curves)} files, {families} families, {points} points; recall with 95 % Wilson interval"
    _show(results, "recall", title, recall_rows(score))
    _show(results, "false_alarms", "False alarms per 10k healthy points, labelled curves", [alarm_row(score, "labelled")])
    _show(results, "onset", "Onset, labelled curves (logged points)", [onset_row(score, "labelled")])
    _show(results, "m4", "Targets on the files of the 80B run, checkpoints every 250 steps", _m4_rows(curves))
    if not quick:
        _show(results, "rules", "The same curves by other tools' rules (loss only)", _rule_rows(curves, score))


def _m4_rows(curves: Sequence[Curve]) -> list[dict[str, Any]]:
    from rollback.detect import Detector
    from rollback.propose import CandidateCheckpoint, History, propose

    rows = []
    for curve in curves:
        if curve.name not in M4_GOLDEN:
            continue
        detector = Detector()
        for step, values, launch in zip(curve.steps, curve.values, curve.launches, strict=True):
            detector.feed(step, values, launch=launch)
        detector.finish()
        grid = range((curve.steps[0] - 2_000) // INTERVAL * INTERVAL, curve.steps[-1], INTERVAL)
        candidates = [CandidateCheckpoint(step=step, verified=True) for step in grid if step >= 0]
        proposal = propose(detector.events, candidates, History(last_step=curve.steps[-1]))
        target, wanted = (proposal.target_step if proposal else None), M4_GOLDEN[curve.name]
        right = target == wanted if wanted is None or target is None else abs(target - wanted) <= INTERVAL
        rows.append({"file": curve.name, "wanted": wanted or "none", "proposed": target or "none", "right": right})
    return rows


def _rule_rows(curves: Sequence[Curve], ours: Score) -> list[dict[str, Any]]:
    rows = [_rule_row("chronicle", ours)]
    for name, rule in RULES.items():
        score = Score()
        for number, curve in enumerate(curves, 1):
            _progress(name, number, len(curves))
            series = _loss_of(curve)
            begin = time.process_time()
            fired = list(rule([value for _, value in series]))
            score.cpu_seconds += time.process_time() - begin
            score.channel_points += len(series)
            at = [series[index][0] for index in fired]
            score_curve(curve, merge_rows(at), score, matching=spread_rows(at))
        rows.append(_rule_row(name, score))
    return rows


def _rule_row(name: str, score: Score) -> dict[str, Any]:
    wanted = {"instant, major": ("instant-spike",), "level shift": ("level-shift",), "gradual": ("gradual-divergence",),
              "NaN": ("nan",)}  # fmt: skip
    row: dict[str, Any] = {"rule": name}
    for title, kinds in wanted.items():
        row[title] = share(score.select(kinds=kinds, major=True if kinds[0] == "instant-spike" else None))
    row["false alarms per 10k"] = f"{score.false_count() * 10_000 / max(1, score.healthy_points):.2f}"
    row["µs a point"] = f"{1e6 * score.cpu_seconds / max(1, score.channel_points):.1f}"
    return row


def _loss_of(curve: Curve) -> list[tuple[int, float]]:
    return [(row, values["loss"]) for row, values in enumerate(curve.values) if "loss" in values]


def _generated(count: int, results: dict[str, Any]) -> None:
    rows, alarms, proposals = [], [], []
    for number, kind in enumerate(MAKERS, 1):
        _progress("generated series", number, len(MAKERS))
        score = Score()
        for curve in generate(kind, count):
            score_curve(curve, run_detector(curve, score), score)
        alarms.append(alarm_row(score, kind))
        if score.found and any(item.label.major for item in score.found):
            rows.append(_class_row(kind, score))
            proposals.append(proposal_row(score, kind))
    _show(results, "generated", f"Generated series, {count} a class", rows)
    _show(results, "generated_alarms", "False alarms per 10k healthy points, generated series", alarms)
    _show(results, "proposals", "Proposals, checkpoints every 250 steps", proposals)


def _class_row(kind: str, score: Score) -> dict[str, Any]:
    seen = [item for item in score.found if item.alarm is not None]
    delay = [item.alarm.row - item.label.onset_row for item in seen if item.alarm is not None]
    row = {"class": kind, "recall": share(score.found), "delay p50": quantile(delay, 0.5), "delay p90": quantile(delay, 0.9)}
    onset = onset_row(score, kind)
    return row | {name: onset[name] for name in ("|onset error| p50", "p90", "bound before onset")}


def _golden(realisations: int, results: dict[str, Any]) -> None:
    rows = []
    for number, golden in enumerate(GOLDEN, 1):
        _progress("events of the 80B run", number, len(GOLDEN))
        targets, right, action = [], 0, 0
        for seed in range(realisations):
            _, proposal = judge(golden, seed)
            right += is_right(golden, proposal)
            action += golden.action is None or (proposal is not None and proposal.action is golden.action)
            targets.append(proposal.target_step if proposal is not None else None)
        shown = ", ".join(str(target) for target in sorted({t for t in targets if t is not None})) or "none"
        rows.append({"event": golden.name, "wanted": golden.target or "none", "proposed": shown,
                     "right": format_share(right, realisations), "action right": f"{action}/{realisations}"})  # fmt: skip
    _show(results, "golden", "Events of the 80B run drawn from its numbers", rows)


def _progress(what: str, done: int, total: int) -> None:
    if not sys.stderr.isatty():
        return
    width = math.ceil(30 * done / total)
    end = "\n" if done == total else ""
    print(f"\r\033[K{what} [{'#' * width}{' ' * (30 - width)}] {done}/{total}", end=end, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())

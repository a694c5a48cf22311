"""Public training logs of other people: read by rules of this file, labelled by a rule, and planted with spikes.

    python -m benchmarks.detector.public_logs --clones DIR --fetch            # 30 repositories, some of several GB
    python -m benchmarks.detector.public_logs --clones DIR --half A [--part 0] [--seed 1] [--only NAME]

Nothing is downloaded without `--fetch`. DIR holds one clone a repository, `owner+name`, at the commits named in SOURCES.

**Curves.** At most three logs a folder, drawn by the CRC of their path, of 100 to 20,000 points and 40 different values, read
by the patterns below and not by chronicle's readers (TensorBoard files excepted); of AlgoPerf two of each submission and
workload. Runs whose steps go back, and runs with more than ten labels, are left out; at most twelve curves a family.

**Halves** by family (MLPerf: workload; AlgoPerf: submission and workload; else repository), the same as in the README's first
section of public logs: the CRC of "k17a/" and the family. The sample of logs is another one than there.
Constants are chosen on half A and on generators; half B is for one look when the rules are final. `--part 1` takes
other logs of the same repositories, so that half B can be looked at once more without any change of the rules in between.

**Labels by rule, frozen 2026-11-23.** The noise of a side is the largest of three: 1.48 medians of the second differences
over the root of six, their 90th percentile over 1.645, 1.48 medians of the differences over four points over the root of two;
sides are up to 26 points before and 32 after. A spike is a rise over the median of the eight points before that is back
within 100 points; major from 18 noise units and a fifth of the level, minor from 9 and a twentieth. Neither healthy nor an
event: smaller or unclear rises from six units of the quieter side, levels that rise by five errors, medians of 24 points an
eighth above the lowest of the last 400 points, values that repeat for ten points.

**Planted** on what is left: one to four spikes of one to three points, at least ten noise units high and between a twentieth
and one and a half of the level (`strange.py`); major from a fifth of the level on, the issue's own line ("minor spikes
(< 20 %)"), minor below; and, in a copy, one divergence that stays. Beside the detector stands the plain rule, eight MADs above
the median of 64 points, in the same run.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import random
import re
import subprocess
import tempfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from benchmarks.detector.curves import Curve, Label
from benchmarks.detector.report import Row, format_table
from benchmarks.detector.rules import window_median
from benchmarks.detector.scoring import Score, merge_rows, run_detector, score_curve, spread_rows
from benchmarks.detector.statistics import format_share, quantile
from benchmarks.detector.strange import _add_spikes
from chronicle.metrics.tensorboard_log import read_event_files
from rollback.detect import Tier

SOURCES = (
    ("10844110/t5-summarization-demo", "bf0ebb2464f6b3c2d6eec7df995767d2de010633"),
    ("akhmetvaleev-ruslan/bashkir-language-audio2text", "97cb6e8aab2de5667f901090c6f517835bbb8b2f"),
    ("aloshdenny/kevin-token-compressor", "ebdda4c8f0bb9710fc79c73f486d4fbd5e2e6574"),
    ("anthonyrathe/fixed-whisperv2-flemish", "9a5b89dff5bd5b396caeb678b02592358fce03a5"),
    ("armenkarakashian/TrOcr-Number-Line-Fraction-Recognition", "4e765ebb22995901b468e482687bd9295244e7f8"),
    ("CoralReefFish/whisper-tiny-nbaiLab", "975bb203671a1e0ba714a7489a9ab7a169c049b0"),
    ("Hahaazaza/Neiro", "c08fa749c6718f104f304938f2b57bdbe2771e2e"),
    ("HangerYang/Star", "57f493e9bf4b61732c607bb21eea01660a87ac59"),
    ("hsc748NLP/NSLLM", "929ee107b192d27a83dc33f617e6e3c2230d038a"),
    ("Merlinmy/Whisper_small_hi", "dc54fe4c62c19ab761b4ff9ad712f6cf202173f7"),
    ("mlcommons/submissions_algorithms", "12c8e4ea93dc41a1ff6abc3debba9accd8ac1e3a"),
    ("mlcommons/training_results_v0.5", "c71f2e7c4b11ec7ab89eb4d8ceaadaae8529fff7"),
    ("mlcommons/training_results_v0.6", "f312518c2d6107eec983750eed23950f1f0c8a0e"),
    ("mlcommons/training_results_v0.7", "0a8a85a209c8e45b661596c382cc20f4e32fd2fe"),
    ("mlcommons/training_results_v1.0", "50619b5df63f1d646715a82c1fb8c35f271e25fa"),
    ("mlcommons/training_results_v1.1", "ebe92f81f7a69255a3b0a907595d8be623d75ec6"),
    ("mlcommons/training_results_v2.0", "8437fbb78349aa3c3054aeccb1d47d2a315a80e7"),
    ("mlcommons/training_results_v2.1", "158189d4cbfbee366c10da1f0f086c85d8f15b5f"),
    ("mlcommons/training_results_v3.0", "63e326c400f5d8bb8c6070a9ab08332d4931152e"),
    ("mlcommons/training_results_v3.1", "d06288b2bd675a9d88e0e6181f5bb5626b71ec19"),
    ("mlcommons/training_results_v4.0", "6fe954378efe4a1a1bd665550b18ff8f26018def"),
    ("mlcommons/training_results_v4.1", "b87b9e396f771345d4ef122ba33456304f15228d"),
    ("mlcommons/training_results_v5.0", "0fdc28f013256aea84fa36fdaf1e0fa46094b18c"),
    ("mlcommons/training_results_v5.1", "441d65f4445cd59687466533fd9f55399136e7a4"),
    ("NijatZeynalov/mT5-based-azerbaijani-news-summarize", "0bcec8a01b1505f5897ad193716f3cea7b1877cd"),
    ("O5-7/chat_glm2_in4_LIL_prefix", "4953fe4784832f7cfc9b65e083e740d84e1eb363"),
    ("openai/parameter-golf", "4908dc46f21ed3fdd08d2fdca285deb2194b9599"),
    ("P4P4N1CK/whisper-large-v2-japanese-5k-steps", "484b1d2bbb58a6a2c8c4cf8ede4dc45f988bc79a"),
    ("PAVANPAGARWADEKAR/PaLM_new", "c174c2baa4db974a0590a1d14bede44da952d811"),
    ("suzushi-tw/luojiu-7b-base", "f6a05a26564c4307e67d84de86bc9855633c7a29"),
    ("syGOAT/Mistral-v0.2-Translator-bf16", "4a1ee35297438df1386c07767af1dbeb7e5f5ea8"),
    ("XXX616519/CogniDet_Repository", "738cdd49d7b0191af6248b7c817494d9dbc926eb"),
)
ALGOPERF = "mlcommons/submissions_algorithms"
Point = tuple[int, dict[str, float]]
Zone = tuple[int, int]  # rows, both ends included


# --- Clones


def fetch(folder: Path) -> None:
    """Bring the commits of SOURCES into `folder`; repositories that are there are left as they are."""
    for name, commit in SOURCES:
        place = folder / name.replace("/", "+")
        if git_dir(folder, name) is not None:
            continue
        subprocess.run(["git", "init", "--quiet", "--bare", str(place)], check=True)
        subprocess.run(["git", "-C", str(place), "fetch", "--depth", "1", f"https://github.com/{name}", commit], check=True)


def git_dir(folder: Path, name: str) -> Path | None:
    """Return the git directory of a clone, bare or not, or None."""
    place = folder / name.replace("/", "+")
    places = (place, place / ".git", place / "repo", place / "repo" / ".git")
    return next((found for found in places if (found / "HEAD").is_file()), None)


def git(place: Path, *arguments: str) -> bytes:
    return subprocess.run(["git", "--git-dir", str(place), *arguments], stdout=subprocess.PIPE, check=True).stdout


def blobs(place: Path, commit: str) -> Iterator[tuple[str, str, int]]:
    """Yield (path, blob, bytes) of every file."""
    for line in git(place, "ls-tree", "-r", "-l", commit).decode("utf-8", "replace").splitlines():
        meta, path = line.split("\t", 1)
        _, kind, blob, size = meta.split()
        if kind == "blob" and size.isdigit():  # the largest files of a partial clone are absent
            yield path.strip('"'), blob, int(size)


# --- Reading

NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|NaN|inf|Infinity)"
STEP = re.compile(
    r"(?:\b(?:global[ _]step|training_steps|step|Step|iter|Iter|ITER|iteration|Iteration|iters|num_updates|updates?|it)"
    r"['\"]?\s*[:=]?\s*\[?\s*(\d+)(?![\d.]*[a-zA-Z%]))"
)
IN_EPOCH = (
    re.compile(r"\(epoch: (\d+), iters: (\d+)"), re.compile(r"epoch (\d+):\s+(\d+) / \d+"),
    re.compile(r"TRAIN \[(\d+)\]\[(\d+)/\d+\]"),
)  # fmt: skip
LOSS = re.compile(
    r"(?<![\w/])(?:train[_/ ]?|training[_ ]|reduced_train_|total[_ ]|step_|mlm_|lm )?[Ll]oss(?:_tracker|/tok| function)?"
    r"['\"]?\s*[:=]?\s*'?(" + NUMBER + r")(?![\d.]*/)"
)
BESIDE = {
    "grad_norm": re.compile(r"(?:grad[_ ]?norm|gnorm)['\"]?\s*[:=]\s*(" + NUMBER + ")"),
    "lr": re.compile(r"(?:learning[_ ]rate|current_lr|\blr)['\"]?\s*[:=]\s*(" + NUMBER + ")"),
}
HELD_OUT_LOSS = re.compile(r"\b(val|valid|eval|test)[_ /]?loss", re.IGNORECASE)
LOSS_COLUMN = re.compile(r"(train[_/ ]?)?loss(_train)?|train/(critic_)?loss|critic_loss|loss/.*|batch_loss", re.IGNORECASE)
STEP_COLUMN = re.compile(r"(global_)?steps?|iter(ation)?s?|update|batch|timesteps?", re.IGNORECASE)
KEYS = {"loss": "loss", "grad_norm": "grad_norm", "learning_rate": "lr", "lr": "lr"}


def read_text(text: str, suffix: str) -> list[Point]:
    """Read a log of any of the known shapes; empty where it is none."""
    if suffix == "json":
        return _of_records(_json_of(text).get("log_history") or [])
    if suffix == "jsonl":
        return _of_records([_json_of(line) for line in text.split("\n")])
    return _of_table(text) if suffix == "csv" else _of_lines(text)


def _json_of(text: str) -> dict[str, object]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _of_records(records: Sequence[Mapping[str, object]]) -> list[Point]:
    points = []
    for record in records:
        step = next((record[key] for key in ("step", "current_steps", "iter", "global_step") if key in record), None)
        values = {ours: float(x) for key, ours in KEYS.items() if isinstance(x := record.get(key), int | float)}
        if isinstance(step, int) and "loss" in values:
            points.append((step, values))
    return points


def _of_table(text: str) -> list[Point]:
    rows = list(csv.DictReader(text.splitlines()))
    names = [name for name in rows[0] if name] if rows else []
    loss = next((name for name in names if LOSS_COLUMN.fullmatch(name.strip())), None)
    step = next((name for name in names if STEP_COLUMN.fullmatch(name.strip())), None)
    points = []
    for number, row in enumerate(rows if loss else []):
        try:
            points.append((int(float(row[step])) if step else number, {"loss": float(row[loss or ""])}))
        except (TypeError, ValueError):
            continue
    return points


def _of_lines(text: str) -> list[Point]:
    found: list[tuple[int, int, dict[str, float]]] = []  # epoch, step in it, values
    for line in text.split("\n"):
        if len(line) > 3000 or (HELD_OUT_LOSS.search(line) and "train" not in line.lower()):
            continue
        loss = LOSS.search(line)
        place = next((match for pattern in IN_EPOCH if (match := pattern.search(line))), None)
        step = STEP.search(line) if place is None else None
        if loss is None or (place is None and step is None):
            continue
        values = {name: float(match[1]) for name, pattern in BESIDE.items() if (match := pattern.search(line))}
        epoch, at = (int(place[1]), int(place[2])) if place else (0, int(step[1]) if step else 0)
        found.append((epoch, at, {"loss": float(loss[1]), **values}))
    points: list[Point] = []
    base, gap = 0, 1
    for number, (epoch, at, values) in enumerate(found):  # steps of an epoch go on from those of the one before
        if number and epoch != found[number - 1][0]:
            base = max(base, points[-1][0] + gap - at)
        elif number and at > found[number - 1][1]:
            gap = at - found[number - 1][1]
        points.append((base + at, values))
    return points


# --- The sample


def sample(folder: Path, only: str = "", part: int = 0) -> Iterator[Curve]:
    """Yield the curves of both halves, labelled; the parts of the sample have no log in common."""
    taken: Counter[str] = Counter()
    seen: set[str] = set()
    for name, commit in SOURCES:
        place = git_dir(folder, name)
        if place is None or only not in name:
            continue
        draw = _algoperf(place, commit, part) if name == ALGOPERF else _logs(place, commit, name, part)
        for family, path, blob, points in draw:
            curve = None if blob in seen or taken[family] >= 12 else to_curve(f"{name}:{path}", family, points)
            seen.add(blob)
            if curve is not None:
                taken[family] += 1
                yield curve


def _logs(place: Path, commit: str, name: str, part: int) -> Iterator[tuple[str, str, str, list[Point]]]:
    folders: dict[str, list[tuple[int, str, str]]] = defaultdict(list)
    mlperf = name.startswith("mlcommons/")
    for path, blob, size in blobs(place, commit):
        suffix = _suffix(path)
        results = "/results/" in path and ("result" in path.rsplit("/", 1)[-1].lower() or path.endswith("log"))
        if not 6000 < size < 8_000_000 or suffix not in ("txt", "log", "json", "jsonl", "csv", "out", "", "err", "stdout"):
            continue
        if (mlperf and not results) or re.search("tokenizer|vocab|merges|config|package|ipynb", path):
            continue
        folders[re.sub(r"\d+", "", path.rpartition("/")[0])].append((zlib.crc32(path.encode()), path, blob))
    for parts in sorted(folders):
        good = 0
        for _, path, blob in sorted(folders[parts])[12 * part : 12 * part + 12]:
            text = git(place, "cat-file", "blob", blob).decode("utf-8", "replace").replace("\r", "\n")
            points = read_text(text, _suffix(path))
            if good < 3 and len(points) >= 100 and len({values["loss"] for _, values in points}) >= 40:
                good += 1
                yield (f"mlperf/{path.split('/')[-2]}" if mlperf else name), path, blob, points[:20_000]


def _suffix(path: str) -> str:
    last = path.rsplit("/", 1)[-1]
    return last.rpartition(".")[2].lower() if "." in last else ""


def _algoperf(place: Path, commit: str, part: int) -> Iterator[tuple[str, str, str, list[Point]]]:
    pattern = re.compile(r".*algoperf_v\d+/logs/\w+/([^/]+)/study_\d+/([^/]+)/trial_\d+/.*tfevents")
    kinds: dict[str, list[tuple[int, str, str]]] = defaultdict(list)
    for path, blob, size in blobs(place, commit):
        match = pattern.match(path)
        if match and 20_000 < size < 3_000_000:
            kinds[f"algo/{match[1]}/{match[2]}"].append((zlib.crc32(f"public/{path}".encode()), path, blob))
    for family in sorted(kinds):
        for _, path, blob in sorted(kinds[family])[2 * part : 2 * part + 2]:
            with tempfile.TemporaryDirectory() as folder:
                copy = Path(folder) / "events.out.tfevents.1.x"
                copy.write_bytes(git(place, "cat-file", "blob", blob))
                points = [(p.step, {k: v for k, v in p.values.items() if v is not None}) for p in read_event_files(copy)]
            yield family, path, blob, points


def to_curve(name: str, family: str, points: Sequence[Point]) -> Curve | None:
    """Label one log; None where it is too short, goes back, or is ill from end to end."""
    kept = [(s, {k: v[k] for k in ("loss", "grad_norm", "lr") if k in v}) for s, v in points if "loss" in v]
    steps = [step for step, _ in kept]
    if len(kept) < 100 or any(b < a for a, b in pairwise(steps)):
        return None
    labels, vague = label(steps, [values["loss"] for _, values in kept])
    if len(labels) > 10:
        return None
    return Curve(
        name=name, family=family, steps=tuple(steps), values=tuple(values for _, values in kept), launches=(None,) * len(kept),
        labels=tuple(labels), dont_care=tuple((steps[max(0, a)], steps[min(len(steps) - 1, b)]) for a, b in vague),
    )  # fmt: skip


def half_of(family: str) -> str:
    return "AB"[zlib.crc32(f"k17a/{family}".encode()) & 1]


# --- Labels by rule


def median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def noise(side: Sequence[float]) -> float:
    """The largest of the three estimates that the docstring of this module names."""
    bends = sorted(abs(side[k - 1] - 2 * side[k] + side[k + 1]) / math.sqrt(6) for k in range(1, len(side) - 1))
    far = [abs(side[k] - side[k - 4]) / math.sqrt(2) for k in range(4, len(side))]
    upper = bends[int(0.9 * (len(bends) - 1))] / 1.645
    return max(1.4826 * median(bends), upper, 1.4826 * median(far) if far else 0.0)


def label(steps: Sequence[int], x: Sequence[float]) -> tuple[list[Label], list[Zone]]:
    """Find what is surely a spike or NaN, and what is neither that nor surely healthy."""
    size, labels, vague = len(x), [], []
    gaps = [b - a for a, b in pairwise(steps)]
    row = 0
    while row < size:
        if not math.isfinite(x[row]):
            end = next((k for k in range(row, size) if math.isfinite(x[k])), size)
            if end - row >= 3:
                labels.append(Label(kind="nan", onset_row=row, peak_row=row, end_row=None if end >= size - 2 else end))
            else:
                vague.append((row - 2, end + 12))
            row = end + 5
            continue
        found = _rise(x, gaps, row) if row >= 12 else None
        if found is None:
            row += 1
            continue
        peak, end_row, clear, units, share = found
        if clear and units >= 18 and share >= 0.2:
            labels.append(Label(kind="instant-spike", onset_row=row, peak_row=peak, end_row=end_row))
        elif clear and units >= 9 and 0.05 <= share < 0.2:
            labels.append(Label(kind="instant-spike", onset_row=row, peak_row=peak, end_row=end_row, major=False))
        else:
            vague.append((row - 10, (end_row if end_row is not None else peak + 300) + 10))
        row = (end_row if end_row is not None else peak + 60) + 3
    return labels, vague + list(_raised(x)) + list(_repeated(x))


def _rise(x: Sequence[float], gaps: Sequence[int], row: int) -> tuple[int, int | None, bool, float, float] | None:
    """Judge the rise at `row`: (peak, end, whether it is clear, noise units, share of the level); None where there is none."""
    low = max(0, row - 32)
    while low < row - 4 and max(gaps[low:row]) > 4 * max(1, min(gaps[low:row])):
        low += 1
    before = [y for y in x[low:row] if math.isfinite(y)]
    if not before:
        return None
    base = median(before[-8:])
    if x[row] - base < 0.04 * abs(base):
        return None
    peak = max(range(row, min(len(x), row + 4)), key=lambda k: x[k] if math.isfinite(x[k]) else -math.inf)
    rise = x[peak] - base
    windows = ((k, [y for y in x[k : k + 4] if math.isfinite(y)]) for k in range(peak + 1, min(len(x), peak + 101)))
    end = next((k for k, near in windows if near and median(near) <= base + 0.25 * rise), None)
    after = [y for y in x[(end or row) + 6 : (end or row) + 38] if math.isfinite(y)]
    sides = [noise(side) for side in (before[-26:], after) if len(side) >= 12]
    sides = sides or [noise(before) if len(before) > 4 else abs(base)]
    least = 1e-4 * abs(base)
    if rise / max(min(sides), least) < 6:
        return None
    clear = x[row] - base >= 0.4 * rise and len(before) >= 24 and len(after) >= 12 and end is not None
    return peak, end, clear, rise / max(max(sides), least), rise / max(abs(base), 1e-12)


def _raised(x: Sequence[float]) -> Iterator[Zone]:
    row = 40
    while row < len(x) - 24:
        before = [y for y in x[row - 40 : row - 8] if math.isfinite(y)]
        after = [y for y in x[row : row + 24] if math.isfinite(y)]
        row += 8
        if len(before) < 20 or len(after) < 20:
            continue
        rise, error = median(after) - median(before), max(noise(before), noise(after)) / math.sqrt(12)
        if rise > max(0.04 * abs(median(before)), 5 * error):
            yield row - 28, row + 72
            row += 16
    lows = [median(x[k : k + 24]) for k in range(0, len(x) - 23, 8)]
    yield from ((8 * k - 20, 8 * k + 44) for k in range(1, len(lows)) if lows[k] > 1.125 * min(lows[max(0, k - 50) : k]))


def _repeated(x: Sequence[float]) -> Iterator[Zone]:
    row = 0
    while row < len(x) - 10:
        same = len(set(x[row : row + 10])) <= 2
        if same:
            yield row - 10, row + 40
        row += 10 if same else 1


# --- Planting


def plant_spikes(curve: Curve, seed: int) -> Curve | None:
    """The curve with one to four spikes where it is healthy; None where its loss is not finite and positive."""
    loss = [values["loss"] for values in curve.values]
    if len(loss) < 120 or not all(math.isfinite(x) for x in loss):
        return None
    level = [median(loss[max(0, row - 16) : row + 17]) for row in range(len(loss))]
    if min(level) <= 0:
        return None
    planted = list(loss)
    labels = _add_spikes(random.Random(f"{seed}/{curve.name}"), planted, level)
    return _with_loss(curve, planted, [found for found in labels if _is_healthy(curve, found.onset_row)])


def plant_divergence(curve: Curve, seed: int) -> Curve | None:
    """The curve with a rise to the end of the log over 30 to 250 points; None where it is too short or not healthy there."""
    loss = [values["loss"] for values in curve.values]
    size, dice = len(loss), random.Random(f"{seed}/up/{curve.name}")
    if size < 400 or not all(math.isfinite(x) for x in loss):
        return None
    onset, over = dice.randrange(size // 4, 3 * size // 4), dice.randrange(30, 250)
    before = loss[onset - 64 : onset]
    middle = median(before)
    height = max(dice.uniform(0.15, 1.5) * abs(middle), 8 * 1.4826 * median([abs(x - middle) for x in before]))
    if not _is_healthy(curve, onset):
        return None
    rising = [x + height * min(1.0, max(0, row - onset) / over) ** 1.5 for row, x in enumerate(loss)]
    there = Label(kind="gradual-divergence", onset_row=onset)
    return replace(_with_loss(curve, rising, [there]), checkpoints=curve.steps[:: max(1, size // 40)])


def _with_loss(curve: Curve, loss: Sequence[float], labels: Sequence[Label]) -> Curve:
    values = tuple({**values, "loss": x} for values, x in zip(curve.values, loss, strict=True))
    return replace(curve, values=values, labels=tuple(labels))


def _is_healthy(curve: Curve, row: int) -> bool:
    steps = curve.steps
    near = any(abs(row - found.onset_row) < 60 for found in curve.labels)
    if near or any(low <= steps[row] <= high for low, high in curve.dont_care):
        return False
    return steps[row] - steps[row - 12] <= 48 * max(1, steps[row] - steps[row - 1])  # no change of the log interval there


# --- Tables


def measure(curves: Sequence[Curve], seed: int) -> list[Row]:
    """One row for the detector and one for the plain rule."""
    whole, spiked = (Score(), Score()), (Score(), Score())
    rising = Score()
    for curve in curves:
        _score(curve, whole)
        if (planted := plant_spikes(curve, seed)) is not None:
            _score(planted, spiked)
        if (planted := plant_divergence(curve, seed)) is not None:
            score_curve(planted, run_detector(planted, rising), rising)
    rows = []
    for which, name in enumerate(("chronicle", "8 MADs of 64")):
        row: Row = {"rule": name}
        for title, score in (("", whole[which]), ("planted ", spiked[which])):
            for kind, major in (("major", True), ("minor", False)):
                found = score.select(kinds=("instant-spike",), major=major)
                row[title + kind] = format_share(sum(item.alarm is not None for item in found), len(found))
        for tier in (Tier.NOTICE, Tier.WARN, Tier.PROPOSE):
            row[f"{tier.value} per 10k"] = f"{1e4 * whole[which].false_count(tier) / max(1, whole[which].healthy_points):.3f}"
        rows.append(row)
    seen = [item for item in rising.found if item.alarm is not None]
    events = [(item.alarm.event, item.label) for item in spiked[0].found + seen if item.alarm is not None]
    onsets = [abs(event.onset_row - found.onset_row) for event, found in events if event and event.onset_row is not None]
    targets = [(curve, proposal.target_step) for curve, proposal in rising.proposals if proposal.target_step is not None]
    right = sum(target <= curve.steps[curve.labels[0].onset_row] for curve, target in targets)
    rows[0] |= {
        "divergence": format_share(len(seen), len(rising.found)), "target before": f"{right}/{len(targets)}",
        "onset error p90": quantile(onsets, 0.9),
    }  # fmt: skip
    rows[1] |= {"divergence": "", "target before": "", "onset error p90": ""}
    return rows


def _score(curve: Curve, scores: tuple[Score, Score]) -> None:
    score_curve(curve, run_detector(curve, scores[0]), scores[0])
    fired = list(window_median([values["loss"] for values in curve.values], window=64, least=8, z=8.0, floor=0.0))
    score_curve(curve, merge_rows(fired), scores[1], matching=spread_rows(fired))


def main(arguments: Sequence[str] | None = None) -> int:
    about = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.detector.public_logs", description=about)
    parser.add_argument("--clones", type=Path, required=True)
    parser.add_argument("--fetch", action="store_true", help="download what is not there")
    parser.add_argument("--half", choices=("A", "B"), default="A")
    parser.add_argument("--seed", type=int, default=1, help="of what is planted")
    parser.add_argument("--part", type=int, default=0, help="of the sample: other logs of the same repositories")
    parser.add_argument("--only", default="", help="repositories whose name holds this")
    options = parser.parse_args(arguments)
    if options.fetch:
        fetch(options.clones)
    curves = [curve for curve in sample(options.clones, options.only, options.part) if half_of(curve.family) == options.half]
    if not curves:
        parser.error(f"no log in `{options.clones}`: name a folder of clones, or bring them with --fetch")
    points, kinds = sum(len(curve.steps) for curve in curves), len({curve.family for curve in curves})
    title = f"Public logs, half {options.half}, part {options.part}: {len(curves)} curves, {kinds} families, {points:,} points"
    title += f", seed {options.seed}"
    print(format_table(title, measure(curves, options.seed)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

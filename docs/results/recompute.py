"""Work out the contrasts of a committed study again, from its CSV files alone: `python docs/results/recompute.py [FOLDER …]`.

Imports numpy and scipy, nothing of chronicle. Reads `outcomes.csv` (one row a run) and what was registered from `plan.json`,
and compares the numbers of `contrast-table.csv`, as they are printed there, with scipy's own tests: paired t, both one-sided
tests at the margin, all or 200,000 sign flips, Wilcoxon's signed ranks and the median of the pairwise means. Ends with 1 where
one differs.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import numpy as np
from scipy import stats

HERE = Path(__file__).resolve().parent
FLIPS = 0.003  # of a sampled sign-flip p: its standard error is below .0012


def rows_of(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file by column."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def flip_p(d: np.ndarray) -> float:
    """Two-sided p over signings of the differences: all of them up to 16 pairs, else 200,000 of another generator."""
    if len(d) <= 16:
        signs = 1 - 2 * ((np.arange(2 ** len(d))[:, None] >> np.arange(len(d))) & 1)
    else:
        signs = np.random.Generator(np.random.PCG64(12345)).choice([-1, 1], size=(200_000, len(d)))
    return float((np.abs(signs @ d) >= abs(d.sum()) * (1 - 1e-9)).mean())


def rank_p(d: np.ndarray) -> float:
    """Wilcoxon's exact two-sided p; rounded outcomes may tie, so ranks are middle ranks (scipy's exact test knows no ties)."""
    d = d[d != 0]
    if not len(d):
        return 1.0
    ranks = (2 * stats.rankdata(np.abs(d))).astype(int)
    ways = np.ones(1)  # of every signing: how many give each value of twice the sum of the positive ranks
    for rank in ranks:
        ways = np.convolve(ways, np.concatenate([[1.0], np.zeros(rank - 1), [1.0]]))
    seen = int(ranks[d > 0].sum())
    return float(min(1.0, 2 * min(ways[: seen + 1].sum(), ways[seen:].sum()) / ways.sum()))


def holm(p: list[float]) -> list[float]:
    """Adjusted p values in the order given."""
    order, found, highest = np.argsort(p, kind="stable"), [0.0] * len(p), 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, (len(p) - rank) * p[index]))
        found[index] = highest
    return found


def numbers(d: np.ndarray, margin: float) -> dict[str, float]:
    """Every number of one contrast, unadjusted."""
    t = stats.ttest_1samp(d, 0.0)
    low, high = t.confidence_interval(0.95)
    above, below = stats.ttest_1samp(d, -margin, alternative="greater"), stats.ttest_1samp(d, margin, alternative="less")
    pairs = [(a + b) / 2 for i, a in enumerate(d) for b in d[i:]]
    return {"mean": float(d.mean()), "low": float(low), "high": float(high), "sd": float(d.std(ddof=1)), "t p": float(t.pvalue),
            "sign-flip p": flip_p(d), "TOST p": float(max(above.pvalue, below.pvalue)), "robust": float(np.median(pairs)),
            "signed-rank p": rank_p(d)}  # fmt: skip


def differences(folder: Path) -> list[str]:
    """Return what differs from the committed table, as sentences."""
    plan, told = json.loads((folder / "plan.json").read_text(encoding="utf-8")), []
    study, values = plan["study"], {}
    for row in rows_of(folder / "outcomes.csv"):
        values.setdefault(row["arm"], {})[int(row["seed"])] = float(list(row.values())[2])
    table = {row["contrast"]: row for row in rows_of(folder / "contrast-table.csv")}
    found, main = {}, []
    for contrast in study["contrasts"]:
        plus, minus = values.get(contrast["plus"], {}), values.get(contrast["minus"], {})
        seeds = sorted(set(plus) & set(minus))
        if len(seeds) >= 2:
            found[contrast["name"]] = numbers(np.array([plus[s] - minus[s] for s in seeds]), study["margin_bpb"])
            main += [contrast["name"]] if contrast["family"] == "main" else []
    for name in ("t p", "sign-flip p", "signed-rank p"):
        for contrast, p in zip(main, holm([found[one][name] for one in main]), strict=True):
            found[contrast][name] = p
    for contrast, mine in found.items():
        row = table[contrast]
        low, high = (float(end) for end in row["95 % interval"].split(" … "))
        theirs = {"low": low, "high": high} | {name: float(row[name]) for name in mine if row.get(name)}
        for name, value in theirs.items():
            allowed = 4 * FLIPS if name == "sign-flip p" else 0.0002  # outcomes and cells are rounded
            if not (abs(value - mine[name]) <= allowed or np.isnan(mine[name])):
                told.append(f"{folder.name}: {contrast}, {name}: {value} there, {mine[name]:.5f} here")
        print(f"{folder.name}: {contrast} {mine['mean']:+.4f} [{low:+.4f}, {high:+.4f}] {row['verdict']}, {len(theirs)} cells")
    return told


def main() -> int:
    """Compare the folders named, or all that are here."""
    folders = [Path(word) for word in sys.argv[1:]] or sorted(path.parent for path in HERE.glob("*/contrast-table.csv"))
    told = [sentence for folder in folders for sentence in differences(folder)]
    print("\n".join(told) or "all cells agree")
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main())

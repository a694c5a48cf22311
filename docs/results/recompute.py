"""Work out the contrasts of a committed study again, from its CSV files alone: `python docs/results/recompute.py [FOLDER …]`.

Imports numpy and scipy, nothing of chronicle. Reads `outcomes.csv` (one row a run) and what was registered from `plan.json`,
and compares the numbers of `contrast-table.csv`, as they are printed there. Where a profile has one common checkpoint, seeds
with the same repeated slice are averaged, and the tests are over these means; where it has several, they are crossed with the
orders: variance components of both, degrees of freedom by Satterthwaite. Ends with 1 where a number differs.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import numpy as np
from scipy import stats

HERE = Path(__file__).resolve().parent


def rows_of(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file by column."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def flip_p(d: np.ndarray) -> float:
    """Two-sided p over all signings of the units."""
    signs = 1 - 2 * ((np.arange(2 ** len(d))[:, None] >> np.arange(len(d))) & 1)
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


def of_units(d: dict[int, float], study: dict, profile: dict) -> tuple[np.ndarray, float, float]:
    """The means that the exact tests are over, the standard error of their mean, and its degrees of freedom."""
    orders, slices = profile["seeds"], len(study["arms"][0]["slices"])
    if profile.get("starts", 1) == 1:
        kinds = {seed: seed if study.get("trainer") else seed % slices for seed in d}
        means = np.array([np.mean([d[s] for s in d if kinds[s] == kind]) for kind in sorted(set(kinds.values()))])
        return means, stats.sem(means), len(means) - 1
    table = np.array([[d[start * orders + order] for order in range(orders)] for start in range(profile["starts"])])
    a, b = table.shape
    main = [(b * stats.tvar(table.mean(1)), a - 1), (a * stats.tvar(table.mean(0)), b - 1)]
    ss_rest = ((table - table.mean()) ** 2).sum() - sum(square * df for square, df in main)
    df_rest = (a - 1) * (b - 1)
    rest = ss_rest / df_rest
    kept = [(square, df) for square, df in main if square > rest]  # a component below nothing is nothing
    total = sum(square for square, _ in kept) - rest * (len(kept) - 1)
    spread = sum(square**2 / df for square, df in kept) + (len(kept) - 1) ** 2 * rest**2 / df_rest
    return table.mean(0) if a <= b else table.mean(1), np.sqrt(total / table.size), total**2 / spread


def numbers(d: dict[int, float], study: dict, profile: dict) -> dict[str, float]:
    """Every number of one contrast, unadjusted."""
    units, error, df = of_units(d, study, profile)
    mean, margin = float(np.mean(list(d.values()))), study["margin_bpb"]
    low, high = stats.t.interval(0.95, df, mean, error)
    inner_low, inner_high = stats.t.interval(0.90, df, mean, error)
    above, below = stats.t.sf((mean + margin) / error, df), stats.t.cdf((mean - margin) / error, df)
    return {"mean": mean, "low": low, "high": high, "inner low": inner_low, "inner high": inner_high, "pairs": len(d),
            "independent units": round(df + 1), "t p": 2 * stats.t.sf(abs(mean) / error, df), "sign-flip p": flip_p(units),
            "TOST p": max(above, below), "signed-rank p": rank_p(units)}  # fmt: skip


def differences(folder: Path) -> list[str]:
    """Return what differs from the committed table, as sentences."""
    plan, told = json.loads((folder / "plan.json").read_text(encoding="utf-8")), []
    study, values = plan["study"], {}
    (profile,) = (one for one in study["profiles"] if one["name"] == plan["profile"])
    for row in rows_of(folder / "outcomes.csv"):
        values.setdefault(row["arm"], {})[int(row["seed"])] = float(list(row.values())[2])
    table = {row["contrast"]: row for row in rows_of(folder / "contrast-table.csv")}
    found, main = {}, []
    for contrast in study["contrasts"]:
        plus, minus = values.get(contrast["plus"], {}), values.get(contrast["minus"], {})
        pairs = {seed: plus[seed] - minus[seed] for seed in sorted(set(plus) & set(minus))}
        if len(pairs) >= 2:
            found[contrast["name"]] = numbers(pairs, study, profile)
            main += [contrast["name"]] if contrast["family"] == "main" else []
    for name in ("t p", "sign-flip p", "signed-rank p"):
        for contrast, p in zip(main, holm([found[one][name] for one in main]), strict=True):
            found[contrast][name] = p
    for contrast, mine in found.items():
        row = table[contrast]
        theirs = {name: float(row[name]) for name in ("mean", "pairs", "independent units", "t p", "sign-flip p", "TOST p")}
        theirs["low"], theirs["high"] = (float(end) for end in row["95 % interval"].split(" … "))
        theirs["inner low"], theirs["inner high"] = (float(end) for end in row["90 % interval"].split(" … "))
        theirs["signed-rank p"] = float(row["signed-rank p / TOST"].partition(" / ")[0])
        for name, value in theirs.items():
            if abs(value - mine[name]) > 0.0002:  # outcomes and cells are rounded
                told.append(f"{folder.name}: {contrast}, {name}: {value} there, {mine[name]:.5f} here")
        print(f"{folder.name}: {contrast} {mine['mean']:+.4f}, {theirs['independent units']:.0f} units, {row['verdict']}")
    return told


def main() -> int:
    """Compare the folders named, or all that are here."""
    folders = [Path(word) for word in sys.argv[1:]] or sorted(path.parent for path in HERE.glob("*/contrast-table.csv"))
    told = [sentence for folder in folders for sentence in differences(folder)]
    print("\n".join(told) or "all cells agree")
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main())

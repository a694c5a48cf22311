"""Steps lost by rollbacks under four ways to keep checkpoints, over 30 run histories. `python -m benchmarks.retention`

Each history saves every `interval` steps and has troubles: an onset, a step at which a sign of it was first recorded, and a
step at which somebody went back. At every save each policy decides again what it keeps, knowing only the past. At the notice,
the loss is the distance from the onset back to the newest kept checkpoint.

    every-4    every 4th checkpoint for ever, and the newest two: what trainers offer
    every-10   the same with every 10th: an even grid in 40 % of the bytes
    newest     the newest ones, in as many bytes as ours
    chronicle  `rollback.plan.retention` with 40 % of the bytes of every-4

Six histories have the shape of public incidents (intervals and delays from their reports; the onset's place is drawn). Of
these the spike of K2-65B showed in the loss from its first save on; the others gave no sign before the notice. The 24 others
give no sign at all, and draw their delay from three classes: soon, log-uniform, and as late as a tenth of the run.

**The worst loss of every-4 cannot be had with 40 % of its bytes**, where a trouble gives no sign. One checkpoint serves the
onsets of the four saves' steps that follow it with a loss of at most four saves; so B checkpoints serve 4 B of N saves, and
with B = N / 10 six onsets of ten are left, whatever is kept and however often it is planned anew. The best that any policy can
promise for every onset is N / (B + 1) saves, which is the even grid's: it is printed. What a policy can choose is for which
onsets it is good. So the second table compares expected losses, free of the luck of the draw: for what each policy held at
each notice, the mean over the class's own distribution of delays; and the least that any choice of as many checkpoints gives
under that distribution (a dynamic program over all choices, made at the notice, knowing the class: no policy can know either).
In the last row the class is not known: each of the three is as likely.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import mean

import numpy as np

from rollback.plan.retention import Save, loss_of, plan_retention

K = 4
SHARE = 0.4
SIZE = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """One run: its name, steps between saves, length in steps, and (onset, sign, notice) of each trouble, in order.

    `kind` is the class of its delays, "" for a public one.
    """

    name: str
    interval: int
    length: int
    troubles: tuple[tuple[int, int, int], ...]
    kind: str = ""


# name, steps between saves, length of the run, steps from the onset to the first sign and to the notice: public reports
PUBLIC = (
    ("Marin #5386: corrupt resumes seen 8,000 steps later", 500, 100_000, 8_000, 8_000),
    ("K2-65B: a spike that lasted 34 checkpoints", 5_000, 340_000, 5_000, 34 * 5_000),
    ("BLOOM: replicas apart for 15 days", 300, 95_000, 12_000, 12_000),
    ("OLMo: 143 TB of checkpoints, a spike seen at once", 1_000, 700_000, 200, 200),
    ("OPT-175B: restart after a divergence seen in hours", 250, 140_000, 400, 400),
    ("PaLM: about 100 steps back for each spike", 100, 255_000, 100, 100),
)
KINDS = ("soon", "log-uniform", "late")


def histories(seed: int) -> list[History]:
    """30 of them: 6 of public shape, 24 drawn."""
    draw = random.Random(seed)
    made = []
    for name, interval, length, sign, delay in PUBLIC:
        notice = draw.randrange(length // 2, length)
        onset = notice - delay
        made.append(History(name=name, interval=interval, length=length, troubles=((onset, onset + sign, notice),)))
    for number in range(24):
        interval = draw.choice((100, 250, 500, 1000))
        length = interval * draw.randrange(150, 1200)
        kind = KINDS[number % 3]
        troubles: list[tuple[int, int, int]] = []
        notice = 0
        for _ in range(draw.randrange(1, 5)):
            longest = {"soon": 4 * interval, "log-uniform": length // 4, "late": length // 10}[kind]
            delay = max(1, round(exp(draw.uniform(0, log(longest)))) if kind != "late" else draw.randrange(interval, longest))
            notice = draw.randrange(notice + delay + 1, notice + delay + length)
            if notice > length:
                break
            troubles.append((notice - delay, notice, notice))
        name = f"{kind} {number}"
        made.append(History(name=name, interval=interval, length=length, troubles=tuple(troubles), kind=kind))
    return made


Known = Sequence[tuple[int, int | None]]  # onset, and the notice where it has come
Policy = Callable[[Sequence[Save], Known, int], list[Save]]


def every(k: int) -> Policy:
    """Every k-th checkpoint, and the newest two."""
    return lambda saves, known, interval: [s for s in saves if s.step // interval % k == 0 or s in saves[-2:]]


def newest(saves: Sequence[Save], known: Known, interval: int) -> list[Save]:
    """The newest ones, in 40 % of the bytes of every-k."""
    return list(saves[-max(2, _budget(saves[-1].step, interval) // SIZE) :])


def ours(saves: Sequence[Save], known: Known, interval: int) -> list[Save]:
    """The policy of `chronicle keep`."""
    plan = plan_retention(
        saves,
        budget_bytes=_budget(saves[-1].step, interval),
        onsets=[onset for onset, _ in known],
        open_onsets=[onset for onset, notice in known if notice is None],
        delays=[notice - onset for onset, notice in known if notice is not None],
    )
    return [save for save, _ in plan.keep]


def _budget(step: int, interval: int) -> int:
    """Bytes: 40 % of what every-4 holds at this step."""
    return max(2 * SIZE, round(SHARE * SIZE * (step // interval / K + 2)))


@dataclass(frozen=True, slots=True)
class Loss:
    """What one rollback lost, in saves, and what was held at its notice: numbers of saves, of `num_saves`."""

    seen: float
    num_saves: int
    held: tuple[int, ...]


def play(history: History, policy: Policy) -> tuple[list[Loss], int]:
    """The losses of its troubles, and the largest number of checkpoints that was held."""
    interval = history.interval
    held: list[Save] = []
    losses: list[Loss] = []
    most = 0
    for count in range(1, history.length // interval + 1):
        step = count * interval
        told = [(onset, notice if notice < step else None) for onset, sign, notice in history.troubles if sign < step]
        held = policy([*held, Save(f"step-{step}", step, SIZE)], told, interval)
        most = max(most, len(held))
        for onset, _, notice in history.troubles:
            if notice // interval == count:
                steps = [save.step for save in held]
                losses.append(Loss(loss_of(steps, onset) / interval, count, tuple(step // interval for step in steps)))
    return losses, most


# --- Expected losses, and the least there can be


Chances = np.ndarray[tuple[int], np.dtype[np.float64]]  # of an onset in the steps from save c to save c + 1, for c = 0 … N


def chances_of(history: History, notice: int, kind: str) -> Chances:
    """Where the onset lies by the class's own distribution of delays, given a notice at this step."""
    interval, length = history.interval, history.length

    def within(delay: int) -> float:
        if kind == "late":
            return min(max((delay - interval) / max(length // 10 - interval, 1), 0.0), 1.0)
        longest = 4 * interval if kind == "soon" else length // 4
        return min(log(max(delay, 1)) / log(longest), 1.0)

    later = np.array([within(notice - count * interval) for count in range(notice // interval + 1)]) / within(notice)
    return later - np.append(later[1:], 0.0)


def expected_loss(chances: Chances, held: Sequence[int]) -> float:
    """Mean loss in whole saves where these saves are held; save 0 is the start."""
    kept, counts = np.unique([0, *held]), np.arange(len(chances))
    return float((chances * (counts - kept[np.searchsorted(kept, counts, side="right") - 1])).sum())


def least_loss(chances: Chances, num_held: int) -> float:
    """The least `expected_loss` of any `num_held` saves, from below: each save is given a price, which is then taken off."""
    size = len(chances)
    total, moment = (np.append(0.0, np.cumsum(x)) for x in (chances, chances * np.arange(size)))

    def at_price(price: float) -> tuple[float, int]:
        cost, count = np.zeros(size + 1), np.zeros(size + 1, dtype=int)
        for kept in range(size - 1, -1, -1):
            following = slice(kept + 1, size + 1)
            found = moment[following] - moment[kept] - kept * (total[following] - total[kept]) + cost[following]
            best = int(np.argmin(found))
            cost[kept], count[kept] = found[best] + price * (kept > 0), count[kept + 1 + best] + (kept > 0)
        return float(cost[0]), int(count[0])

    low, high, least = 0.0, float(size), 0.0
    for _ in range(24):
        price = (low + high) / 2
        cost, count = at_price(price)
        least = max(least, cost - price * num_held)  # a lower bound at every price
        low, high = (price, high) if count > num_held else (low, price)
    return least


def main() -> None:
    """Print a row for each public history, each policy's totals, and the expected losses of each class."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    runs = histories(options.seed)
    policies: dict[str, Policy] = {"every-4": every(K), "every-10": every(10), "newest": newest, "chronicle": ours}
    played = {name: [play(run, policy) for run in runs] for name, policy in policies.items()}
    print(f"steps lost, worst of a history{'':<25}{''.join(f'{name:>12}' for name in policies)}")
    for index, run in enumerate(runs[: len(PUBLIC)]):
        worst = [max((loss.seen for loss in played[name][index][0]), default=0) * run.interval for name in policies]
        print(f"  {run.name:<53}" + "".join(f"{steps:>12.0f}" for steps in worst))
    losses = {name: [loss for found, _ in rows for loss in found] for name, rows in played.items()}
    for name in policies:
        most = [held / other for (_, held), (_, other) in zip(played[name], played["every-4"], strict=True)]
        seen, base = [loss.seen for loss in losses[name]], [loss.seen for loss in losses["every-4"]]
        no_worse = sum(mine <= theirs for mine, theirs in zip(seen, base, strict=True))
        print(
            f"{name:<10} bytes {mean(most):4.2f} of every-4   loss in saves: worst {max(seen):6.1f}  mean {mean(seen):5.2f}"
            f"   no worse than every-4 in {no_worse} of {len(seen)} rollbacks"
        )
    floor = max(loss.num_saves / (len(loss.held) + 1) for loss in losses["chronicle"])
    print(f"the least worst loss that any policy can promise with as many checkpoints as ours: {floor:.1f} saves")
    print(f"expected loss in saves, by class{'':<12}{''.join(f'{name:>12}' for name in policies)}{'least':>12}")
    places = [(run, notice) for run in runs for _, _, notice in run.troubles]
    for label, kinds in [*((kind, [kind]) for kind in KINDS), ("not known which", list(KINDS))]:
        chosen = [index for index, (run, _) in enumerate(places) if run.kind in kinds]
        chances = [np.mean([chances_of(*places[index], kind) for kind in kinds], axis=0) for index in chosen]
        pairs = list(zip(chosen, chances, strict=True))
        means = [mean(expected_loss(chance, losses[name][index].held) for index, chance in pairs) for name in policies]
        least = mean(least_loss(chance, len(losses["chronicle"][index].held)) for index, chance in pairs)
        row = "".join(f"{value:>12.2f}" for value in (*means, least))
        print(f"  {f'{label}, {len(chosen)} rollbacks':<42}{row}")


if __name__ == "__main__":
    main()

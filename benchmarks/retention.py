"""Steps lost by rollbacks under three ways to keep checkpoints, over 30 run histories. `python -m benchmarks.retention`

Each history saves every `interval` steps and has troubles: an onset, and a step at which somebody noticed. At every save each
policy decides again what it keeps, knowing only the past. At the notice, the loss is the distance from the onset back to the
newest kept checkpoint.

    every-k    every k-th checkpoint for ever, and the newest two: what trainers offer (k = 4)
    newest     the newest ones, in as many bytes as ours
    chronicle  `rollback.plan.retention` with 40 % of the bytes of every-k

Six histories have the shape of public incidents (intervals and delays from their reports; the onset's place is drawn). The
others draw their delay from three distributions: soon, log-uniform, and as late as a tenth of the run.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import mean

from rollback.plan.retention import Save, loss_of, plan_retention

K = 4
SHARE = 0.4
SIZE = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """One run: its name, steps between saves, length in steps, and (onset, notice) of each trouble, in order."""

    name: str
    interval: int
    length: int
    troubles: tuple[tuple[int, int], ...]


# name, steps between saves, length of the run, delay between onset and notice: from the public reports
PUBLIC = (
    ("Marin #5386: corrupt resumes seen 8,000 steps later", 500, 100_000, 8_000),
    ("K2-65B: a spike that lasted 34 checkpoints", 5_000, 340_000, 34 * 5_000),
    ("BLOOM: replicas apart for 15 days", 300, 95_000, 12_000),
    ("OLMo: 143 TB of checkpoints, a spike seen at once", 1_000, 700_000, 200),
    ("OPT-175B: restart after a divergence seen in hours", 250, 140_000, 400),
    ("PaLM: about 100 steps back for each spike", 100, 255_000, 100),
)


def histories(seed: int) -> list[History]:
    """30 of them: 6 of public shape, 24 drawn."""
    draw = random.Random(seed)
    made = []
    for name, interval, length, delay in PUBLIC:
        notice = draw.randrange(length // 2, length)
        made.append(History(name=name, interval=interval, length=length, troubles=((notice - delay, notice),)))
    for number in range(24):
        interval = draw.choice((100, 250, 500, 1000))
        length = interval * draw.randrange(150, 1200)
        kind = ("soon", "log-uniform", "late")[number % 3]
        troubles: list[tuple[int, int]] = []
        notice = 0
        for _ in range(draw.randrange(1, 5)):
            longest = {"soon": 4 * interval, "log-uniform": length // 4, "late": length // 10}[kind]
            delay = max(1, round(exp(draw.uniform(0, log(longest)))) if kind != "late" else draw.randrange(interval, longest))
            notice = draw.randrange(notice + delay + 1, notice + delay + length)
            if notice > length:
                break
            troubles.append((notice - delay, notice))
        made.append(History(name=f"{kind} {number}", interval=interval, length=length, troubles=tuple(troubles)))
    return made


Policy = Callable[[Sequence[Save], Sequence[tuple[int, int]], int], list[Save]]


def every_k(saves: Sequence[Save], known: Sequence[tuple[int, int]], interval: int) -> list[Save]:
    """Every K-th checkpoint, and the newest two."""
    return [save for save in saves if save.step // interval % K == 0 or save in saves[-2:]]


def newest(saves: Sequence[Save], known: Sequence[tuple[int, int]], interval: int) -> list[Save]:
    """The newest ones, in 40 % of the bytes of every-k."""
    return list(saves[-max(2, _budget(saves[-1].step, interval) // SIZE) :])


def ours(saves: Sequence[Save], known: Sequence[tuple[int, int]], interval: int) -> list[Save]:
    """The policy of `chronicle keep`."""
    plan = plan_retention(
        saves,
        budget_bytes=_budget(saves[-1].step, interval),
        onsets=[onset for onset, _ in known],
        delays=[notice - onset for onset, notice in known],
    )
    return [save for save, _ in plan.keep]


def _budget(step: int, interval: int) -> int:
    """Bytes: 40 % of what every-k holds at this step."""
    return max(2 * SIZE, round(SHARE * SIZE * (step // interval / K + 2)))


def play(history: History, policy: Policy) -> tuple[list[int], int]:
    """The losses of its troubles in steps, and the largest number of checkpoints that was held."""
    held: list[Save] = []
    losses, most = [], 0
    notices = {notice // history.interval: (onset, notice) for onset, notice in history.troubles}
    known: list[tuple[int, int]] = []
    for count in range(1, history.length // history.interval + 1):
        step = count * history.interval
        held = policy([*held, Save(f"step-{step}", step, SIZE)], known, history.interval)
        most = max(most, len(held))
        if count in notices:
            onset, notice = notices[count]
            losses.append(loss_of([save.step for save in held], onset))
            known.append((onset, notice))
    return losses, most


def main() -> None:
    """Print a row for each public history and each policy's totals."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    runs = histories(options.seed)
    policies: dict[str, Policy] = {"every-k": every_k, "newest": newest, "chronicle": ours}
    played = {name: [play(run, policy) for run in runs] for name, policy in policies.items()}
    print(f"steps lost, worst of a history{'':<25}{''.join(f'{name:>12}' for name in policies)}")
    for index, run in enumerate(runs[: len(PUBLIC)]):
        print(f"  {run.name:<53}" + "".join(f"{max(played[name][index][0], default=0):>12}" for name in policies))
    base = [max(losses, default=0) / run.interval for (losses, _), run in zip(played["every-k"], runs, strict=True)]
    for name in policies:
        losses = [max(found, default=0) / run.interval for (found, _), run in zip(played[name], runs, strict=True)]
        most = [held / other for (_, held), (_, other) in zip(played[name], played["every-k"], strict=True)]
        no_worse = sum(mine <= theirs for mine, theirs in zip(losses, base, strict=True))
        print(
            f"{name:<10} bytes {mean(most):4.2f} of every-k   loss in saves: worst {max(losses):6.1f}  mean {mean(losses):5.2f}"
            f"   no worse than every-k in {no_worse} of {len(runs)}"
        )


if __name__ == "__main__":
    main()

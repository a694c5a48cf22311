"""The events of the seed's 80B run, drawn again from the numbers of its plots, with a healthy prefix in front.

Sources: the research notes' table of events (§3.2) and constants (§3.1). A checkpoint lies every 250 steps. A target is
right when it lies within one interval of the one named there and never after the onset.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.detector.generate import CHECKPOINT_INTERVAL, seed_lr, to_bf16
from rollback.detect import Detector, Event
from rollback.propose import Action, CandidateCheckpoint, History, PastRollback, Proposal, propose

PREFIX_STEPS = 2_000
SIGMA = 0.0115

Shape = Callable[[int], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Golden:
    """One event of the chronicle; `target` None: nothing may be proposed."""

    name: str
    last_step: int
    level: float
    shapes: tuple[tuple[int, Shape], ...]  # (step, excess over the level in nats by steps since)
    target: int | None
    first_step: int
    onset: int | None = None
    rollbacks: tuple[PastRollback, ...] = ()
    hardware: tuple[tuple[int, str], ...] = ()
    action: Action | None = None
    restarts: tuple[int, ...] = ()


def spike(height: float, length: float = 6.0) -> Shape:
    """Up in one step, down with an e-fold of `length` steps."""
    return lambda since: height * math.exp(-since / length)


def shift(height: float, within: float = 20.0) -> Shape:
    """Up to `height` within so many steps, and there to stay."""
    return lambda since: height * min(1.0, since / within)


def explosion(fold: float, top: float, start: float = 0.006) -> Shape:
    """An e-fold every `fold` steps up to `top`."""
    return lambda since: min(top, start * math.expm1(min(60.0, since / fold)))


def bump(height: float, length: float) -> Shape:
    """A resume bump: decays over `length` steps."""
    return lambda since: height * math.exp(-3.0 * since / length)


def hump(height: float, length: float) -> Shape:
    """Up and down again as half a sine."""
    return lambda since: height * math.sin(math.pi * since / length) if since < length else 0.0


GOLDEN = (
    Golden(name="resume-spikes", first_step=0, last_step=1_620, level=1.78, target=None,
           shapes=((1_430, bump(0.07, 40)), (1_496, bump(0.08, 30)), (1_574, bump(0.10, 40))),
           restarts=(1_430, 1_496, 1_574)),
    Golden(name="exp1", first_step=12_000, last_step=15_611, level=1.6505, target=14_500, onset=14_655, shapes=(
        (13_914, spike(0.07)), (14_037, spike(0.5)), (14_655, shift(0.0145, 10)), (14_795, spike(0.27)),
        (14_856, spike(1.95)), (15_030, spike(0.15)), (15_340, spike(0.4)), (15_490, shift(0.29, 120)))),
    Golden(name="exp2", first_step=12_500, last_step=15_400, level=1.6505, target=14_500, onset=14_650,
           shapes=((14_650, shift(0.035, 200)),), action=Action.LR_75,
           rollbacks=(PastRollback(onset_step=14_655, target_step=14_750),)),
    Golden(name="exp3", first_step=14_500, last_step=16_730, level=1.6526, target=16_250, onset=16_470,
           shapes=((16_470, shift(0.02, 30)), (16_600, hump(0.03, 90))), action=Action.HARDWARE,
           hardware=((16_430, "Xid 64 on ip-26-0-147-135"),)),
    Golden(name="exp4", first_step=14_500, last_step=16_718, level=1.6518, target=16_000, onset=16_470,
           shapes=((16_470, shift(0.02, 30)), (16_600, hump(0.03, 90))), action=Action.LR_50,
           rollbacks=(PastRollback(onset_step=14_655, target_step=14_500, action=Action.LR_75, lr_scale=0.75),
                      PastRollback(onset_step=16_470, target_step=16_250, action=Action.HARDWARE))),
    Golden(name="05-30", first_step=15_500, last_step=17_950, level=1.6458, target=None,
           shapes=((17_530, spike(0.08, 8)), (17_555, spike(1.3, 10)), (17_595, spike(1.45, 12)))),
    Golden(name="exp6", first_step=21_300, last_step=23_507, level=1.655, target=23_250, onset=23_357,
           shapes=((23_357, shift(0.075, 20)),)),
    Golden(name="exp7", first_step=23_300, last_step=25_436, level=1.655, target=25_000, onset=25_325,
           shapes=((25_325, explosion(15.0, 2.8, 0.02)),)),
    Golden(name="exp8", first_step=27_500, last_step=30_150, level=1.65, target=29_750, onset=29_905,
           shapes=((29_453, spike(0.15)), (29_905, shift(0.03, 40)))),
    Golden(name="exp11", first_step=32_000, last_step=36_030, level=1.65, target=34_500, onset=34_750,
           shapes=((33_950, hump(0.05, 60)), (34_750, shift(0.02, 60)), (35_150, hump(0.06, 40)),
                   (35_455, explosion(25.0, 6.0, 0.05)))),
)  # fmt: skip


def draw(golden: Golden, seed: int) -> list[tuple[int, dict[str, float], int]]:
    """Return (step, values, launch) of one noise realisation."""
    rng = random.Random(f"{golden.name}/{seed}")
    points, noise, launch = [], 0.0, 1
    for step in range(golden.first_step, golden.last_step + 1):
        if step in golden.restarts:
            launch += 1
        noise = 0.2 * noise + rng.gauss(0.0, SIGMA * math.sqrt(1 - 0.2**2))
        excess = math.fsum(shape(step - start) for start, shape in golden.shapes if step >= start)
        early = 6.0 * math.exp(-step / 150.0) if golden.first_step == 0 else 0.0
        loss = to_bf16(max(0.01, golden.level + early + excess + noise))
        points.append((step, {"loss": loss, "lr": seed_lr(max(1, step), 0.75)}, launch))
    return points


def judge(golden: Golden, seed: int) -> tuple[tuple[Event, ...], Proposal | None]:
    """Fold one realisation and make the proposal that the run would have seen."""
    detector = Detector()
    for step, values, launch in draw(golden, seed):
        detector.feed(step, values, launch=launch)
    detector.finish()
    steps = range(golden.first_step - golden.first_step % CHECKPOINT_INTERVAL, golden.last_step, CHECKPOINT_INTERVAL)
    candidates = [CandidateCheckpoint(step=step, verified=True) for step in steps if step >= golden.first_step]
    history = History(last_step=golden.last_step, rollbacks=golden.rollbacks, hardware=golden.hardware)
    return detector.events, propose(detector.events, candidates, history)


def is_right(golden: Golden, proposal: Proposal | None) -> bool:
    """Nothing where nothing was due; else within one interval of the target and never after the onset."""
    if golden.target is None or proposal is None:
        return golden.target is None and proposal is None
    if proposal.target_step is None or (golden.onset is not None and proposal.target_step >= golden.onset):
        return False
    return abs(proposal.target_step - golden.target) <= CHECKPOINT_INTERVAL


BLOOM: Sequence[tuple[int, float, float]] = (
    (31_214, 2.198845, 0.242), (31_215, 2.220424, 0.947), (31_216, 2.595213, 2.39), (31_217, 2.241558, 15.886),
    (31_218, 2.345279, 145.119), (31_219, 5.098124, 960.351), (31_220, 3.492029, 353.201), (31_221, 3.213059, 379.33),
    (31_222, 2.804948, 650.246),
)  # fmt: skip


def draw_bloom(seed: int = 0, last_step: int = 31_400) -> list[tuple[int, dict[str, float]]]:
    """BLOOM-176B's only spike: the log lines that its authors quote, healthy before, back at 31,250 as quoted."""
    rng = random.Random(f"bloom/{seed}")
    quoted = {step: (loss, norm) for step, loss, norm in BLOOM}
    points = []
    for step in range(29_500, last_step + 1):
        loss, norm = 2.2 + rng.gauss(0.0, 0.012), 0.25 * math.exp(rng.gauss(0.0, 0.12))
        if 31_222 < step < 31_250:  # between the quoted lines: a decay from the last to the first quiet one
            loss += 0.6 * math.exp(-(step - 31_222) / 7.0)
            norm += 600.0 * math.exp(-(step - 31_222) / 2.5)
        loss, norm = quoted.get(step, (loss, norm))
        points.append((step, {"loss": loss, "grad_norm": norm, "lr": 5.279e-5 - (step - 31_214) * 5e-10}))
    return points

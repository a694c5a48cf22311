"""The state of one channel's fold: a few dozen scalars and bounded lists, without behaviour."""

from __future__ import annotations

import math
from collections import deque

from rollback.detect.config import ChannelConfig
from rollback.detect.excursion import ChannelEvent, Excursion
from rollback.detect.noise import GridSense

SCALARS = (
    "rows", "last_step", "level", "middle", "slow", "scale", "inflation", "root", "widening", "cusum", "cusum_row",
    "tail_u", "tail_beta", "pairs", "hot", "cold", "far", "marginal", "frozen", "wander", "next_calibration",
    "healthy", "block_sum", "block_size", "block_1", "block_2", "blocks", "long_run", "last_end", "restart_row",
    "non_finite", "next_id", "last_hot", "quantum", "settled", "height", "relapse", "relapse_row", "plateau",
    "strayed", "strayed_row",
)  # fmt: skip
PARTS = (
    "before", "buffer", "config", "events", "excursion", "gains", "grid", "history", "lagged", "name", "order", "residuals",
    "respikes", "sorted", "warm",
)  # fmt: skip


class ChannelState:
    """What a fold remembers; `rows` are points seen, levels are in the channel's unit (log10 for norms)."""

    __slots__ = (*SCALARS, *PARTS)

    def __init__(self, name: str, config: ChannelConfig) -> None:
        self.name, self.config = name, config
        self.gains = (2.0 / (config.slow_points + 1), 2.0 / (config.middle_points + 1))
        self.rows = 0
        self.last_step: int | None = None
        self.warm: list[tuple[int, int, float]] = []
        self.level = self.middle = self.slow = self.scale = 0.0
        self.inflation = self.root = self.widening = 1.0  # long-run over one point's variance, its roots
        self.wander = 1.0  # the least inflation that the run's own residuals ask for
        self.healthy = 0  # points folded outside events
        self.next_calibration = config.calibrate_points
        self.cusum, self.cusum_row = 0.0, -1
        self.tail_u, self.tail_beta = 1.645, config.tail_prior
        self.pairs = 0  # bits: which of the last three points were near the threshold
        self.hot = 0  # points above the threshold in a row
        self.far = 0  # points far above the reference in a row
        self.marginal = 1.5  # mean absolute residual x 1.25, in units of the local scale
        self.cold = 0  # points far below it in a row
        self.last_hot = -1000
        self.frozen = 0
        self.block_sum, self.block_size, self.block_1, self.block_2, self.blocks = 0.0, 0, 0.0, 0.0, 0
        self.long_run = 0.0
        self.last_end = self.restart_row = -(10**9)
        self.non_finite = 0  # points in a row
        self.next_id = 0
        self.quantum = 0.0
        self.settled = 0
        self.height = config.cusum_height
        self.relapse, self.relapse_row, self.plateau = 0.0, -1, 0.0
        self.strayed, self.strayed_row = 0.0, 0  # the highest slow rise that came back by itself, and when it did
        self.order: deque[float] = deque()
        self.sorted: list[float] = []
        self.lagged: deque[float] = deque(maxlen=max(1, config.lag_points // 16))
        self.buffer: deque[tuple[int, int, float, float]] = deque(maxlen=config.buffer_points)
        self.residuals: deque[float] = deque(maxlen=config.residual_points)
        self.history: deque[tuple[int, float, float, float]] = deque(maxlen=512)  # (step, level, middle, slow)
        self.grid = GridSense()
        self.excursion: Excursion | None = None
        self.respikes: list[ChannelEvent] = []
        self.before: tuple[float, float] | None = None  # level and natural fall before the last restart
        self.events: list[ChannelEvent] = []  # open ones only

    def set_inflation(self, inflation: float) -> None:
        """Keep the two roots that every point needs beside it."""
        self.inflation, self.root = inflation, math.sqrt(inflation)
        self.widening = math.sqrt(self.root)

    def take_id(self) -> int:
        self.next_id += 1
        return self.next_id

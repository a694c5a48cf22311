"""Telemetry of windows of bits: the numbers K, C and S, for inputs and for predictions of the model.

K  1 − H₂(share of ones); for outputs 1 − mean H₂(p_t): the certainty of the model. It does not see repetition in inputs.
C  Lempel-Ziv 1976 phrases · log2(n) / n, clipped at 1.2: `0101…` and zeros near 0, text 0.3–0.8, noise above 1.
   The flip rate is a separate, cheap number; it is maximal for `0101…`.
S  exp(−KL(mean prediction per bit of the byte ‖ frequencies of the data)); 1 where they are equal.

A fixed floor of 0.3 flags one in twenty windows of ordinary code, so floors are calibrated on data (`calibrate`). Windows
have 256 bytes or more, because C is biased upwards on shorter ones; short windows are joined (`join_windows`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bit_transformer.data.bits import BITS_PER_BYTE

MIN_WINDOW_BYTES = 256
C_CEILING = 1.2
_CONSTANT_SPREAD = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """K, C, S and the flip rate of one window (or of a batch: the mean)."""

    k: float
    c: float
    s: float
    flip_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Floors:
    """Limits of windows that are like the data: C above `c_floor` and below `c_ceiling`, S above `s_floor`."""

    c_floor: float
    s_floor: float
    c_ceiling: float = 1.0
    source: str = "default"

    def to_json(self) -> dict[str, Any]:
        """Return plain values, for the journal."""
        return asdict(self)


def binary_entropy(p: Tensor) -> Tensor:
    """Return H₂ in bits; 0 at 0 and 1."""
    entropy: Tensor = (torch.special.entr(p) + torch.special.entr(1 - p)) / math.log(2)
    return entropy


def certainty_of_input(bits_BT: Tensor) -> Tensor:
    """Return K of each window, (B,)."""
    return 1 - binary_entropy(bits_BT.double().mean(-1))


def certainty_of_output(logits_BT2: Tensor) -> Tensor:
    """Return K of the model's predictions for each window, (B,)."""
    return 1 - binary_entropy(torch.softmax(logits_BT2.double(), -1)[..., 1]).mean(-1)


def flip_rate(bits_BT: Tensor) -> Tensor:
    """Return the share of neighbours that differ, (B,)."""
    return (bits_BT[:, 1:] != bits_BT[:, :-1]).double().mean(-1)


def count_phrases(bits_T: NDArray[np.uint8]) -> int:
    """Return the number of Lempel-Ziv (1976) phrases: each the shortest that does not occur earlier, overlap allowed."""
    text = bits_T.astype(np.uint8).tobytes()
    phrases, start, length = 0, 0, len(text)
    while start < length:
        end = start + 1
        while end <= length and text.find(text[start:end], 0, end - 1) >= 0:
            end += 1
        phrases, start = phrases + 1, end
    return phrases


def complexity(bits_BT: Tensor) -> Tensor:
    """Return C of each window, (B,)."""
    n = bits_BT.shape[-1]
    counts = [count_phrases(row) for row in bits_BT.to(torch.uint8).cpu().numpy()]
    return torch.tensor([min(C_CEILING, count * math.log2(n) / n) for count in counts], dtype=torch.float64)


def place_frequencies(bits_BT: Tensor) -> Tensor:
    """Return the share of ones at each of the nine places of a byte, (9,)."""
    return bits_BT.reshape(-1, BITS_PER_BYTE).double().mean(0)


def agreement(logits_BT2: Tensor, frequencies_9: Tensor) -> Tensor:
    """Return S of each window, (B,). Position t predicts place (t + 1) mod 9; the last prediction has no bit."""
    p_BT = torch.softmax(logits_BT2[:, :-1].double(), -1)[..., 1]
    place_T = (torch.arange(p_BT.shape[1], device=p_BT.device) + 1) % BITS_PER_BYTE
    mean_B9 = torch.stack([p_BT[:, place_T == place].mean(-1) for place in range(BITS_PER_BYTE)], -1)
    return agreement_of_means(mean_B9, frequencies_9)


def agreement_of_bits(bits_BT: Tensor, frequencies_9: Tensor) -> Tensor:
    """Return S of windows of bits against the frequencies of all data, (B,)."""
    return agreement_of_means(bits_BT.reshape(len(bits_BT), -1, BITS_PER_BYTE).double().mean(1), frequencies_9)


def agreement_of_means(mean_B9: Tensor, frequencies_9: Tensor) -> Tensor:
    """Return exp(−KL) of the mean of each place of a byte against its frequency, (B,)."""
    q_9 = frequencies_9.double().clamp(1e-6, 1 - 1e-6)
    kl_B9 = -(torch.special.entr(mean_B9) + torch.special.entr(1 - mean_B9)) - (
        mean_B9 * q_9.log() + (1 - mean_B9) * (1 - q_9).log())
    return torch.exp(-kl_B9.clamp(min=0).mean(-1))


def measure(bits_BT: Tensor, certainty_B: Tensor, agreement_B: Tensor) -> list[Telemetry]:
    """Return the telemetry of each window: C and flip rate of its bits, beside K and S as they are given."""
    columns = (certainty_B, complexity(bits_BT), agreement_B, flip_rate(bits_BT))
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [Telemetry(k=k, c=c, s=s, flip_rate=f) for k, c, s, f in rows]


def join_windows(windows_BT: Tensor) -> Tensor:
    """Join consecutive rows (B, T, …) until each holds 256 bytes or more.

    Left-over rows are dropped, unless there are too few for one window.
    """
    rows = min(len(windows_BT), -(-MIN_WINDOW_BYTES * BITS_PER_BYTE // windows_BT.shape[1]))
    count = len(windows_BT) // rows
    return windows_BT[: count * rows].reshape(count, -1, *windows_BT.shape[2:])


def mean_of(rows: Iterable[Telemetry]) -> Telemetry:
    """Return the mean of each number."""
    found = list(rows)
    return Telemetry(**{name: sum(getattr(row, name) for row in found) / len(found) for name in Telemetry.__slots__})


def calibrate(rows: Iterable[Telemetry], *, quantile: float = 0.001) -> Floors:
    """Return floors at the lower quantile of C and S over the training data, the ceiling at C's upper one."""
    found = list(rows)
    c, s = np.array([row.c for row in found]), np.array([row.s for row in found])
    return Floors(c_floor=float(np.quantile(c, quantile)), s_floor=float(np.quantile(s, quantile)),
                  c_ceiling=max(1.0, float(np.quantile(c, 1 - quantile))),
                  source=f"{quantile:.1%} quantile of {len(found)} training windows")


def constant_channels(rows: Iterable[Mapping[str, float]]) -> tuple[str, ...]:
    """Return the names of numbers that do not change over the observations."""
    found = list(rows)
    if len(found) < 2:
        return ()
    values = {name: [row[name] for row in found] for name in found[0]}
    return tuple(name for name, column in values.items() if max(column) - min(column) < _CONSTANT_SPREAD)

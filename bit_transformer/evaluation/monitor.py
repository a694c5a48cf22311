"""What is watched beside the loss, at every evaluation: K, C and S, the safety gate, and numbers that stand still.

Floors come from the training data, once, and travel with the checkpoint. Everything found is a `Notice`: one line on
stderr and one journal entry. The gate's state decides alike on every rank, because it hears only of values that every
rank has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from bit_transformer.data.bits import BITS_PER_BYTE, encode_bytes
from bit_transformer.errors import GateTripped
from bit_transformer.evaluation.gate import Gate, GateConfig, GateState, Limit
from bit_transformer.model.transformer import BitTransformer
from bit_transformer.evaluation.telemetry import (
    MIN_WINDOW_BYTES,
    Floors,
    Telemetry,
    calibrate,
    constant_channels,
    join_windows,
    mean_of,
    measure,
    measure_bits,
    place_frequencies,
)

CALIBRATION_WINDOWS = 200
CONSTANT_AFTER = 5  # evaluations without a change
_RATIO = "held-out bpb over its best"


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """One sentence for stderr and the journal; `kind` is the entry's."""

    kind: str
    text: str
    data: Mapping[str, Any]


class Monitor:
    """State of the watch; saved with the checkpoint, so that a resume neither calibrates nor burns in again."""

    def __init__(self, config: GateConfig, *, windows: int) -> None:
        self.config, self.windows = config, windows  # 256-byte windows a source, 0: no telemetry
        self.floors: Floors | None = None
        self.frequencies_9: tuple[float, ...] = ()
        self.best = math.inf
        self.state = GateState.BURN_IN
        self._gate = Gate(limits={_RATIO: Limit(ceiling=config.max_ratio)}, decay=config.decay, burn_in=config.burn_in,
                          strict=False)
        self._rows: list[dict[str, float]] = []
        self._constant: tuple[str, ...] = ()

    def calibrate(self, bits_BT: Tensor) -> Notice:
        """Take floors and frequencies from windows of training data."""
        joined = join_windows(bits_BT)
        frequencies_9 = place_frequencies(joined)
        self.frequencies_9 = tuple(frequencies_9.tolist())
        self.floors = calibrate(measure_bits(joined, frequencies_9))
        return Notice(kind="telemetry.floors", data=self.floors.to_json(), text=(
            f"C from {self.floors.c_floor:.3f} to {self.floors.c_ceiling:.3f}, S above {self.floors.s_floor:.3f} "
            f"({self.floors.source})"))

    def observe(self, bpb: float, row: Mapping[str, float]) -> list[Notice]:
        """Take one evaluation: held-out bits per byte and the telemetry of this moment (empty: none)."""
        return [*self._observe_gate(bpb), *self._observe_row(row)]

    def require_ok(self) -> None:
        """Raise GateTripped in strict mode while the gate is tripped; every rank alike."""
        if self.state is GateState.TRIPPED and self.config.mode == "strict":
            raise GateTripped(self._sentence(), "roll back with `chronicle rollback`, or set gate.mode=soft to go on")

    def _observe_gate(self, bpb: float) -> list[Notice]:
        self.best = min(self.best, bpb)
        verdict = self._gate.observe({_RATIO: bpb / self.best})
        before, self.state = self.state, verdict.state
        if before is self.state or (before is GateState.BURN_IN and self.state is GateState.OK):
            return []
        return [Notice(kind="gate", text=self._sentence(), data={"state": str(self.state), **verdict.smoothed})]

    def _sentence(self) -> str:
        return (f"{self.state}: {_RATIO} ({self.best:.3f}) is {self._gate.averages[_RATIO]:.3f} smoothed, limit "
                f"{self.config.max_ratio:g}")

    def _observe_row(self, row: Mapping[str, float]) -> list[Notice]:
        if not row:
            return []
        self._rows = [*self._rows, dict(row)][-CONSTANT_AFTER:]
        before = self._constant
        self._constant = constant_channels(self._rows) if len(self._rows) == CONSTANT_AFTER else ()
        new = [name for name in self._constant if name not in before]
        if not new:
            return []
        told = ", ".join(f"{name} {row[name]:.4f}" for name in new)
        return [Notice(kind="telemetry.constant", data={name: row[name] for name in new}, text=(
            f"{told} did not change over {CONSTANT_AFTER} evaluations: a number that stands still measures nothing"))]

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {"floors": self.floors.to_json() if self.floors else None, "frequencies": list(self.frequencies_9),
                "best": self.best, "state": str(self.state), "gate": self._gate.state_dict(), "rows": self._rows,
                "constant": list(self._constant)}

    def load(self, data: Mapping[str, Any]) -> None:
        """Take over what `to_json` wrote."""
        self.floors = Floors(**data["floors"]) if data["floors"] else None
        self.frequencies_9 = tuple(data["frequencies"])
        self.best, self.state = float(data["best"]), GateState(data["state"])
        self._gate.load_state_dict(data["gate"])
        self._rows, self._constant = [dict(row) for row in data["rows"]], tuple(data["constant"])


def telemetry_rows(window_bytes: int, windows: int) -> int:
    """Return how many windows of a recipe make `windows` windows of 256 bytes."""
    return windows * -(-MIN_WINDOW_BYTES // window_bytes)


@torch.no_grad()
def measure_model(model: BitTransformer, held_out: Mapping[str, Tensor], frequencies_9: Sequence[float], *,
                  windows: int) -> Telemetry:
    """Return the mean telemetry of what the model would write at each place of held-out windows, the truth before it.

    One draw a bit from the model's own probabilities, with a fixed seed; `windows` windows of 256 bytes a source. Every
    rank computes all of it, as sharded parameters want.
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    rows = []
    for bytes_BN in held_out.values():
        bits_BT = encode_bytes(bytes_BN[: telemetry_rows(bytes_BN.shape[1], windows)].to(device))
        logits_BT2 = model(bits_BT).logits_BTV
        p_BT = torch.softmax(logits_BT2[:, :-1], -1)[..., 1].cpu()
        drawn_BT = (torch.rand(p_BT.shape, generator=torch.Generator().manual_seed(0)) < p_BT).long()
        written_BT = torch.cat([bits_BT[:, :1].cpu(), drawn_BT], 1)
        rows += measure(join_windows(written_BT), join_windows(logits_BT2.cpu()), torch.tensor(frequencies_9))
    model.train(was_training)
    return mean_of(rows)


def describe(model: Telemetry, batch: Telemetry) -> dict[str, float]:
    """Return the row of one evaluation: the model's numbers, and those of the batch it was just fed as `input_…`."""
    return {**asdict(model), **{f"input_{name}": value for name, value in asdict(batch).items()}}


def measure_batch(bits_BT: Tensor, frequencies_9: Sequence[float]) -> Telemetry:
    """Return the mean telemetry of the bits a rank was fed."""
    whole = bits_BT[:, : bits_BT.shape[1] // BITS_PER_BYTE * BITS_PER_BYTE].cpu()
    return mean_of(measure_bits(join_windows(whole), torch.tensor(frequencies_9)))

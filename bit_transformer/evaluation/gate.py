"""The safety gate: limits on smoothed values, checked at every evaluation of a run; texts drawn at its end.

A value that is not finite closes the gate at once: it is a finding, never a part of an average.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bit_transformer.data.bits import BITS_PER_BYTE, decode_text, encode_bytes, encode_text, repair_parity
from bit_transformer.errors import BadRecipe, GateTripped
from bit_transformer.evaluation.telemetry import (
    MIN_WINDOW_BYTES,
    Floors,
    Telemetry,
    agreement,
    agreement_of_bits,
    calibrate,
    certainty_of_input,
    certainty_of_output,
    constant_channels,
    join_windows,
    mean_of,
    measure,
    place_frequencies,
)
from bit_transformer.model.transformer import BitTransformer
from chronicle.journal.events import Gate as GateChanged
from chronicle.journal.events import JournalEvent, TelemetryConstant, TelemetryFloors


@dataclass(frozen=True, slots=True, kw_only=True)
class GateConfig:
    """`strict` ends the launch at a trip, `soft` reports it; `max_ratio` bounds held-out bpb relative to its best value."""

    mode: str = "soft"
    decay: float = 0.9
    burn_in: int = 10
    max_ratio: float = 1.3

    def __post_init__(self) -> None:
        if self.mode not in ("soft", "strict"):
            raise BadRecipe(f"gate mode is `{self.mode}`, expected soft or strict")
        if not 0 <= self.decay < 1 or self.burn_in < 0 or self.max_ratio <= 1:
            raise BadRecipe(f"gate is {self}, expected decay from 0 to below 1, burn_in 0 or more, max_ratio above 1")


class GateState(StrEnum):
    """WARN: within a tenth of a limit. TRIPPED: at or beyond it, or not finite."""

    BURN_IN = "burn-in"
    OK = "ok"
    WARN = "warn"
    TRIPPED = "tripped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A smoothed value must stay above `floor` and below `ceiling`."""

    floor: float = -math.inf
    ceiling: float = math.inf

    def state(self, value: float) -> GateState:
        """Return the state of a finite value relative to its limits."""
        above, below = value - self.floor, self.ceiling - value
        if min(above, below) <= 0:
            return GateState.TRIPPED
        is_near = above <= abs(self.floor) / 10 < math.inf or below <= abs(self.ceiling) / 10 < math.inf
        return GateState.WARN if is_near else GateState.OK


@dataclass(frozen=True, slots=True, kw_only=True)
class GateVerdict:
    """The gate's result after an observation; `tripped` names the values that closed it."""

    state: GateState
    smoothed: Mapping[str, float]
    tripped: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class SmoothedGate:
    """Limits on exponential averages of named values; no finite value trips it during the first `burn_in` observations."""

    limits: Mapping[str, Limit]
    decay: float = 0.9
    burn_in: int = 10
    strict: bool = True
    num_observations: int = 0
    averages: dict[str, float] = field(default_factory=dict)

    def observe(self, values: Mapping[str, float]) -> GateVerdict:
        """Add one observation of every limited value. Raises GateTripped in strict mode."""
        self.num_observations += 1
        states, sentences = dict[str, GateState](), list[str]()
        for name, limit in self.limits.items():
            value = values[name]
            if not math.isfinite(value):
                states[name] = GateState.TRIPPED
                sentences.append(f"{name} is {value} at observation {self.num_observations}, expected a finite number")
                continue
            before = self.averages.get(name, value)
            average = self.averages[name] = self.decay * before + (1 - self.decay) * value
            burns_in = self.num_observations <= self.burn_in
            states[name] = GateState.BURN_IN if burns_in else limit.state(average)
            if states[name] is GateState.TRIPPED:
                sentences.append(f"smoothed {name} is {average:.4g} after {self.num_observations} observations, "
                                 f"expected above {limit.floor} and below {limit.ceiling}")
        if sentences and self.strict:
            raise GateTripped("; ".join(sentences))
        worst = max(states.values(), key=list(GateState).index)
        tripped = tuple(name for name, state in states.items() if state is GateState.TRIPPED)
        return GateVerdict(state=worst, smoothed=dict(self.averages), tripped=tripped)

    def state_dict(self) -> dict[str, Any]:
        """Return the averages, so that a resume does not repeat the burn-in."""
        return {"num_observations": self.num_observations, "averages": dict(self.averages)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore saved averages."""
        self.num_observations, self.averages = int(state["num_observations"]), dict(state["averages"])


# --- During training: K, C and S, the gate, and numbers that do not change

CALIBRATION_WINDOWS = 200
CONSTANT_AFTER = 5  # evaluations without a change
_RATIO = "held-out bpb over its best"


class Notice(NamedTuple):
    """A journal entry of the trainer, and its sentence for stderr and the entry's title."""

    event: JournalEvent
    text: str


class Monitor:
    """Watches telemetry and held-out loss at every evaluation.

    Its state is saved with the checkpoint, so that a resume repeats neither calibration nor burn-in. The gate decides the
    same on every rank.
    """

    def __init__(self, config: GateConfig, *, windows: int) -> None:
        self.config = config
        self.windows = windows  # 256-byte windows per source, 0: no telemetry
        self.floors: Floors | None = None
        self.frequencies_9: tuple[float, ...] = ()
        self.best = math.inf
        self.state = GateState.BURN_IN
        limits = {_RATIO: Limit(ceiling=config.max_ratio)}
        self._gate = SmoothedGate(limits=limits, decay=config.decay, burn_in=config.burn_in, strict=False)
        self._sentence = ""
        self._rows: list[dict[str, float]] = []
        self._constant: tuple[str, ...] = ()

    def calibrate(self, bits_BT: Tensor) -> Notice:
        """Set floors and bit frequencies from windows of training data."""
        joined = join_windows(bits_BT)
        frequencies_9 = place_frequencies(joined)
        self.frequencies_9 = tuple(frequencies_9.tolist())
        k, s = certainty_of_input(joined), agreement_of_bits(joined, frequencies_9)
        self.floors = floors = calibrate(measure(joined, k, s))
        return Notice(TelemetryFloors.from_json(floors.to_json()), (
            f"C from {floors.c_floor:.3f} to {floors.c_ceiling:.3f}, S above {floors.s_floor:.3f} ({floors.source})"))

    def observe(self, bpb: float, row: Mapping[str, float]) -> list[Notice]:
        """Add one evaluation: held-out bits per byte and the telemetry (empty: none); return what to report."""
        return [*self._observe_gate(bpb), *self._observe_row(row)]

    def require_ok(self) -> None:
        """Raise GateTripped in strict mode while the gate is tripped, on every rank alike."""
        if self.state is GateState.TRIPPED and self.config.mode == "strict":
            raise GateTripped(self._sentence, "roll back with `chronicle rollback`, or set gate.mode=soft to go on")

    def _observe_gate(self, bpb: float) -> list[Notice]:
        if bpb < self.best:
            self.best = bpb
        ratio = bpb / self.best
        verdict = self._gate.observe({_RATIO: ratio})
        before, self.state = self.state, verdict.state
        smoothed = self._gate.averages.get(_RATIO, math.nan)
        told = f"is {smoothed:.3f} smoothed" if math.isfinite(ratio) else f"is {ratio}: no number"
        self._sentence = f"{self.state}: {_RATIO} ({self.best:.3f}) {told}, limit {self.config.max_ratio:g}"
        if before is self.state or (before is GateState.BURN_IN and self.state is GateState.OK):
            return []
        return [Notice(GateChanged.from_json({"state": str(self.state), **verdict.smoothed}), self._sentence)]

    def _observe_row(self, row: Mapping[str, float]) -> list[Notice]:
        if not row:
            return []
        self._rows = [*self._rows, dict(row)][-CONSTANT_AFTER:]
        before = self._constant
        self._constant = constant_channels(self._rows) if len(self._rows) == CONSTANT_AFTER else ()
        new = {name: row[name] for name in self._constant if name not in before}
        if not new:
            return []
        told = ", ".join(f"{name} {value:.4f}" for name, value in new.items())
        return [Notice(TelemetryConstant.from_json(new), (
            f"{told} did not change over {CONSTANT_AFTER} evaluations: a constant number measures nothing"))]

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {"floors": self.floors.to_json() if self.floors else None, "frequencies": list(self.frequencies_9),
                "best": self.best, "state": str(self.state), "gate": self._gate.state_dict(), "rows": self._rows,
                "constant": list(self._constant), "sentence": self._sentence}

    def load(self, data: Mapping[str, Any]) -> None:
        """Restore the output of `to_json`."""
        self.floors = Floors(**data["floors"]) if data["floors"] else None
        self.frequencies_9 = tuple(data["frequencies"])
        self.best, self.state = float(data["best"]), GateState(data["state"])
        self._gate.load_state_dict(data["gate"])
        self._rows, self._constant = [dict(row) for row in data["rows"]], tuple(data["constant"])
        self._sentence = data["sentence"]


def telemetry_rows(window_bytes: int, windows: int) -> int:
    """Return how many windows of the recipe are needed for `windows` windows of 256 bytes."""
    return windows * math.ceil(MIN_WINDOW_BYTES / window_bytes)


@torch.no_grad()
def measure_model(model: BitTransformer, held_out: Mapping[str, Tensor], frequencies_9: Sequence[float], *,
                  windows: int) -> Telemetry:
    """Return the mean telemetry of one draw per bit from the model's predictions on held-out windows, with a fixed seed.

    `windows` windows of 256 bytes per source. Collective under sharding: every rank computes all of it.
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    rows = []
    for bytes_BN in held_out.values():
        bits_BT = encode_bytes(bytes_BN[: telemetry_rows(bytes_BN.shape[1], windows)].to(device))
        logits_BT2 = model(bits_BT).logits_BTV.cpu()
        p_BT = torch.softmax(logits_BT2[:, :-1], -1)[..., 1]
        drawn_BT = (torch.rand(p_BT.shape, generator=torch.Generator().manual_seed(0)) < p_BT).long()
        written_BT = join_windows(torch.cat([bits_BT[:, :1].cpu(), drawn_BT], 1))
        joined_BT2 = join_windows(logits_BT2)
        s = agreement(joined_BT2, torch.tensor(frequencies_9))
        rows += measure(written_BT, certainty_of_output(joined_BT2), s)
    model.train(was_training)
    return mean_of(rows)


# --- Sampling text


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Texts that continue one prompt; `num_repairs` of their `num_bytes` parity bits were wrong."""

    prompt: str
    texts: tuple[str, ...]
    num_bytes: int
    num_repairs: int
    bits_BT: Tensor
    logits_BT2: Tensor

    def outside(self, floors: Floors, found: Telemetry) -> str:
        """Return which of C and S are not like the data's; empty where both are."""
        states = {"C": Limit(floor=floors.c_floor, ceiling=floors.c_ceiling).state(found.c),
                  "S": Limit(floor=floors.s_floor).state(found.s)}
        return " and ".join(name for name, state in states.items() if state is GateState.TRIPPED)

    def telemetry(self, frequencies_9: Sequence[float]) -> Telemetry:
        """Return the telemetry of all texts together: K of the predictions, C and S of the drawn bits."""
        bits_BT = join_windows(self.bits_BT)
        k = certainty_of_output(join_windows(self.logits_BT2))
        return mean_of(measure(bits_BT, k, agreement_of_bits(bits_BT, torch.tensor(frequencies_9))))


@torch.no_grad()
def sample_texts(model: BitTransformer, prompt: str, num_bytes: int, *, count: int, seed: int = 0,
                 temperature: float = 0.8, after_byte: Callable[[int], None] = lambda done: None) -> Samples:
    """Continue `prompt` (at least one byte) by `num_bytes` bytes, `count` times; equal seeds give equal texts.

    `after_byte` is called with the number of bytes done of each text.
    """
    generator = torch.Generator().manual_seed(seed)
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    bits_BT, num_repairs = encode_text(prompt).repeat(count, 1), 0
    logits = []
    begin, most_bytes = bits_BT.shape[1], model.config.max_bits // BITS_PER_BYTE - 1
    for done in range(num_bytes):
        start = max(0, bits_BT.shape[1] // BITS_PER_BYTE - most_bytes) * BITS_PER_BYTE
        for _ in range(BITS_PER_BYTE):
            logits.append(model(bits_BT[:, start:].to(device)).logits_BTV[:, -1].cpu())
            p_B = torch.softmax(logits[-1] / temperature, -1)[:, 1]
            drawn_B = torch.rand(count, generator=generator) < p_B
            bits_BT = torch.cat([bits_BT, drawn_B.long()[:, None]], 1)
        repaired, wrong = repair_parity(bits_BT[:, -BITS_PER_BYTE:])
        bits_BT = torch.cat([bits_BT[:, :-BITS_PER_BYTE], repaired], 1)
        num_repairs += wrong
        after_byte(done + 1)
    model.train(was_training)
    texts = tuple(decode_text(row[begin:]) for row in bits_BT)
    return Samples(prompt=prompt, texts=texts, num_bytes=num_bytes * count, num_repairs=num_repairs,
                   bits_BT=bits_BT[:, begin:], logits_BT2=torch.stack(logits, 1))

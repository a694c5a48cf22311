"""Text out of the model, a bit at a time, with parity repaired and counted, and judged by the safety gate.

Windows begin on byte boundaries, so a text longer than the model's window is continued from its last bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bit_transformer.data.bits import BITS_PER_BYTE, decode_text, encode_text, repair_parity
from bit_transformer.evaluation.gate import Gate, GateConfig, Limit, Verdict
from bit_transformer.model.transformer import BitTransformer
from bit_transformer.evaluation.telemetry import (
    Floors,
    Telemetry,
    agreement_of_bits,
    certainty_of_output,
    complexity,
    flip_rate,
    join_windows,
    mean_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Texts that continue one prompt; `num_repairs` of their `num_bytes` parity bits were wrong."""

    prompt: str
    texts: tuple[str, ...]
    num_bytes: int
    num_repairs: int
    bits_BT: Tensor
    logits_BT2: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """The samples kept, how often they were drawn, their telemetry and what the gate says of them."""

    samples: Samples
    draws: int
    telemetry: Telemetry
    verdict: Verdict


@torch.no_grad()
def sample_texts(model: BitTransformer, prompt: str, num_bytes: int, *, count: int = 1, seed: int = 0,
                 temperature: float = 0.8, after_byte: Callable[[int], None] = lambda done: None) -> Samples:
    """Continue `prompt` (at least one byte) by `num_bytes` bytes, `count` times; equal seeds give equal texts.

    `after_byte` hears how many bytes of each text are done.
    """
    if model.config.vocab != 2:
        raise ValueError("sampling is for bit models")
    generator = torch.Generator().manual_seed(seed)
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    bits_BT, num_repairs = encode_text(prompt).repeat(count, 1), 0
    logits = []
    begin, window = bits_BT.shape[1], model.config.max_bits - BITS_PER_BYTE
    for done in range(num_bytes):
        for _ in range(BITS_PER_BYTE):
            start = max(0, -(-(bits_BT.shape[1] - window) // BITS_PER_BYTE)) * BITS_PER_BYTE
            logits.append(model(bits_BT[:, start:].to(device)).logits_BTV[:, -1].cpu())
            p_B = torch.softmax(logits[-1] / temperature, -1)[:, 1]
            drawn_B = torch.rand(count, generator=generator) < p_B
            bits_BT = torch.cat([bits_BT, drawn_B.long()[:, None]], 1)
        repaired, wrong = repair_parity(bits_BT[:, -BITS_PER_BYTE:])
        bits_BT = torch.cat([bits_BT[:, :-BITS_PER_BYTE], repaired], 1)
        num_repairs += wrong
        after_byte(done + 1)
    model.train(was_training)
    return Samples(prompt=prompt, texts=tuple(decode_text(row[begin:]) for row in bits_BT), num_bytes=num_bytes * count,
                   num_repairs=num_repairs, bits_BT=bits_BT[:, begin:], logits_BT2=torch.stack(logits, 1))


def measure_samples(samples: Samples, frequencies_9: Sequence[float]) -> Telemetry:
    """Return the telemetry of texts taken together: K of the predictions, C and S of what was written."""
    bits_BT, logits_BT2 = join_windows(samples.bits_BT), join_windows(samples.logits_BT2)
    columns = (certainty_of_output(logits_BT2), complexity(bits_BT),
               agreement_of_bits(bits_BT, torch.tensor(frequencies_9)), flip_rate(bits_BT))
    return mean_of(Telemetry(k=k, c=c, s=s, flip_rate=f)
                   for k, c, s, f in zip(*(column.tolist() for column in columns), strict=True))


def sample_under_gate(model: BitTransformer, prompt: str, num_bytes: int, *, count: int, floors: Floors,
                      frequencies_9: Sequence[float], config: GateConfig,
                      after_byte: Callable[[int], None] = lambda done: None) -> Judged:
    """Draw samples until C and S are within the floors of the data, at most `1 + config.redraws` times.

    Each draw is judged by itself: smoothing over redraws would let a bad one condemn the next. Raises GateTripped at the
    first bad one where the gate is strict; where it is soft the last draw is kept and its verdict says what is wrong.
    """
    limits = {"C of the samples": Limit(floor=floors.c_floor, ceiling=floors.c_ceiling),
              "S of the samples": Limit(floor=floors.s_floor)}
    gate = Gate(limits=limits, decay=0.0, burn_in=0, strict=config.mode == "strict")
    for draw in range(1 + config.redraws):
        samples = sample_texts(model, prompt, num_bytes, count=count, seed=draw, after_byte=after_byte)
        telemetry = measure_samples(samples, frequencies_9)
        verdict = gate.observe({"C of the samples": telemetry.c, "S of the samples": telemetry.s})
        if not verdict.retry:
            break
    return Judged(samples=samples, draws=draw + 1, telemetry=telemetry, verdict=verdict)

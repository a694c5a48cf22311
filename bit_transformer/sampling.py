"""Text out of the model, a bit at a time, with parity repaired and counted.

Windows begin on byte boundaries, so a text longer than the model's window is continued from its last bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bit_transformer.bits import BITS_PER_BYTE, decode_text, encode_text, repair_parity
from bit_transformer.model import BitTransformer


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A generated text; `num_repairs` parity bits of its new bytes were wrong."""

    prompt: str
    text: str
    num_repairs: int


@torch.no_grad()
def sample_text(model: BitTransformer, prompt: str, num_bytes: int, *, seed: int = 0, temperature: float = 0.8) -> Sample:
    """Continue `prompt` (at least one byte) by `num_bytes` bytes; equal seeds give equal texts."""
    if model.config.vocab != 2:
        raise ValueError("sampling is for bit models")
    generator = torch.Generator().manual_seed(seed)
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    bits_T, num_repairs = encode_text(prompt), 0
    window = model.config.max_bits - BITS_PER_BYTE
    for _ in range(num_bytes):
        for _ in range(BITS_PER_BYTE):
            start = max(0, -(-(bits_T.numel() - window) // BITS_PER_BYTE)) * BITS_PER_BYTE
            logits_2 = model(bits_T[None, start:].to(device)).logits_BTV[0, -1].cpu()
            p = torch.softmax(logits_2 / temperature, -1)[1]
            bits_T = torch.cat([bits_T, (torch.rand((), generator=generator) < p).long()[None]])
        repaired, wrong = repair_parity(bits_T[-BITS_PER_BYTE:])
        bits_T = torch.cat([bits_T[:-BITS_PER_BYTE], repaired])
        num_repairs += wrong
    model.train(was_training)
    return Sample(prompt=prompt, text=decode_text(bits_T[encode_text(prompt).numel():]), num_repairs=num_repairs)

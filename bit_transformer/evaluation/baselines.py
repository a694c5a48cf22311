"""What a bit model must beat, on the same held-out bytes: coin flip, unigram bytes, an order-3 context mix, xz, zstd.

Bits per byte, all of them. The compressors see the held-out text alone (as the model sees windows of it), so they pay
for learning it; the unigram and the context mix are fitted on training text.
"""

from __future__ import annotations

import lzma
import math
from collections import Counter, defaultdict

import zstandard

from bit_transformer.data.bits import COIN_FLIP_BITS_PER_BYTE

_ORDER = 3
_MAX_TRAIN_BYTES = 500_000


def unigram_bpb(train: bytes, held_out: bytes) -> float:
    """Return the cross-entropy of held-out bytes under the training text's byte frequencies, one added to each."""
    counts = Counter(train)
    total = len(train) + 256
    return sum(-math.log2((counts[byte] + 1) / total) * n for byte, n in Counter(held_out).items()) / len(held_out)


def context_mix_bpb(train: bytes, held_out: bytes) -> float:
    """Return the cross-entropy under a mix of orders 0 to 3, each backing off to the one below (Witten-Bell weights)."""
    tables: list[dict[bytes, Counter[int]]] = [defaultdict(Counter) for _ in range(_ORDER + 1)]
    text = train[:_MAX_TRAIN_BYTES]
    for position, byte in enumerate(text):
        for order in range(min(_ORDER, position) + 1):
            tables[order][text[position - order:position]][byte] += 1
    bits = 0.0
    for position, byte in enumerate(held_out):
        probability = 1 / 256
        for order in range(min(_ORDER, position) + 1):
            seen = tables[order].get(held_out[position - order:position])
            if seen:
                total, kinds = seen.total(), len(seen)
                probability = (seen[byte] + kinds * probability) / (total + kinds)
        bits -= math.log2(probability)
    return bits / len(held_out)


def xz_bpb(held_out: bytes) -> float:
    """Return what `xz -6` needs, without container overhead."""
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6}]
    return 8 * len(lzma.compress(held_out, format=lzma.FORMAT_RAW, filters=filters)) / len(held_out)


def zstd_bpb(held_out: bytes) -> float:
    """Return what `zstd -19` needs."""
    return 8 * len(zstandard.ZstdCompressor(level=19).compress(held_out)) / len(held_out)


def baselines(train: bytes, held_out: bytes) -> dict[str, float]:
    """Return every yardstick that can be had here; the coin flip counts the parity bit, as the model's loss does."""
    return {"coin flip": COIN_FLIP_BITS_PER_BYTE, "unigram": unigram_bpb(train, held_out),
            "order 3": context_mix_bpb(train, held_out), "xz": xz_bpb(held_out), "zstd": zstd_bpb(held_out)}

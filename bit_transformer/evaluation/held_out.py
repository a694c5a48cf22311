"""Held-out bits per byte: of the model, of the baselines it must beat, and of the exported eight- and four-bit models."""

from __future__ import annotations

import lzma
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import zstandard
from safetensors.torch import save_file
from torch import Tensor

from bit_transformer.data.bits import encode_bytes
from bit_transformer.model.conversion import export_int8, weight_bytes
from bit_transformer.model.transformer import BitTransformer, next_symbol_losses

_BATCH = 64


@torch.no_grad()
def evaluate(model: BitTransformer, windows: Mapping[str, Tensor], *, rank: int = 0, world_size: int = 1) -> dict[str, float]:
    """Return the held-out bits per byte of each source. Collective: each rank computes its share, all ranks get the result.

    Bits per byte = sum of the losses over all positions / ln 2 / bytes, which compares bit, byte and BPE models. The
    first symbol of a window is not predicted and counts as a coin flip.
    """
    device = next(model.parameters()).device
    sums = torch.zeros(len(windows), dtype=torch.float64, device=device)
    as_bytes = model.config.vocab == 256
    was_training = model.training
    model.eval()
    for row, windows_BN in enumerate(windows.values()):
        for bytes_BN in windows_BN[rank::world_size].to(device).split(_BATCH):  # type: ignore[no-untyped-call]
            symbols_BT = bytes_BN.long() if as_bytes else encode_bytes(bytes_BN)
            losses = next_symbol_losses(model(symbols_BT).logits_BTV, symbols_BT).double()
            sums[row] += losses.sum() + math.log(model.config.vocab) * len(symbols_BT)
    model.train(was_training)
    if world_size > 1:
        dist.all_reduce(sums)
    totals = zip(windows.items(), sums.tolist(), strict=True)
    return {name: total / math.log(2) / windows_BN.numel() for (name, windows_BN), total in totals}


def mixture_bpb(found: Mapping[str, float], weights: Mapping[str, int]) -> float:
    """Return the mean bits per byte of the sources, with the weights of the mixture."""
    return sum(found[name] * weights[name] for name in found) / sum(weights.values())


# --- Baselines

MOST_READ = 500_000  # bytes of training text that a baseline reads


def order_bpb(train: bytes, held_out: bytes, order: int) -> float:
    """Return the cross-entropy of the text under the counts of contexts of 0 to `order` bytes in the training text.

    Each length of context backs off to the shorter one (Witten-Bell weights), the last one to 256 equal bytes.
    """
    tables: list[dict[bytes, Counter[int]]] = [defaultdict(Counter) for _ in range(order + 1)]
    for position, byte in enumerate(train):
        for length in range(min(order, position) + 1):
            tables[length][train[position - length:position]][byte] += 1
    bits = 0.0
    for position, byte in enumerate(held_out):
        probability = 1 / 256
        for length in range(min(order, position) + 1):
            seen = tables[length].get(held_out[position - length:position])
            if seen:
                total, kinds = seen.total(), len(seen)
                probability = (seen[byte] + kinds * probability) / (total + kinds)
        bits -= math.log2(probability)
    return bits / len(held_out)


def compress_xz(text: bytes) -> bytes:
    """`xz -6`, without the header of a file."""
    return lzma.compress(text, format=lzma.FORMAT_RAW, filters=[{"id": lzma.FILTER_LZMA2, "preset": 6}])


def compress_zstd(text: bytes) -> bytes:
    """`zstd -19`."""
    return zstandard.ZstdCompressor(level=19).compress(text)


def added_bpb(compress: Callable[[bytes], bytes], train: bytes, held_out: bytes) -> float:
    """Return the bits per byte that a compressor adds for the held-out text after it has read the training text."""
    return 8 * (len(compress(train + held_out)) - len(compress(train))) / len(held_out)


def baselines(train: bytes, held_out: bytes) -> dict[str, float]:
    """Return all baselines on the held-out text; each has read the first `MOST_READ` bytes of the training text."""
    train = train[:MOST_READ]
    return {"unigram": order_bpb(train, held_out, 0), "order 3": order_bpb(train, held_out, 3),
            "xz": added_bpb(compress_xz, train, held_out), "zstd": added_bpb(compress_zstd, train, held_out)}


# --- The exported model


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRow:
    """One form of the model. `bpb` is over the mixture; milliseconds are CPU time of one thread, one window a call."""

    name: str
    bytes: int
    bpb: float
    ms_per_window: float


def export_int8_beside_float32(model: BitTransformer, held_out: Mapping[str, Tensor], weights: Mapping[str, int],
                               path: Path | None) -> list[ExportRow]:
    """Move the model to the CPU, export it to int8, measure both forms; write the export to `path` (None: measure only)."""
    model = model.cpu().eval()
    small = export_int8(model)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(small.state_dict(), path)
    rows = []
    for name, form in (("float32", model), ("int8", small)):
        started = time.process_time()
        for _ in range(5):
            evaluate(form, {"window": next(iter(held_out.values()))[:1]})
        ms_per_window = (time.process_time() - started) / 5 * 1e3
        rows.append(ExportRow(name=name, bytes=weight_bytes(form), bpb=mixture_bpb(evaluate(form, held_out), weights),
                              ms_per_window=ms_per_window))
    return rows

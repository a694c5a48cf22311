"""Measurements of a study's model: averaged weights, held-out text, and two k-shot tasks.

The copy task is a small analogue of k-shot evaluation: the bits of the last copy of a random string after k earlier copies,
with equal position and length for every k. No gain at the common checkpoint means "not measurable at this size".
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bit_transformer.data.bits import BITS_PER_BYTE, encode_bytes
from bit_transformer.model.transformer import next_symbol_losses

__all__ = ["AveragedWeights", "copy_task", "digest_state", "held_out_bpb", "recall_task"]

COPIES = (0, 2, 4)
LONGEST_STRING = 8
NUM_PROBES = 96
EVAL_BATCH = 64
LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", dtype=np.uint8)


class AveragedWeights:
    """An exponential moving average of the weights, restored exactly at every restart."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.values = {name: value.detach().clone() for name, value in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Add the weights after a step to the average."""
        for name, value in model.named_parameters():
            self.values[name].lerp_(value.detach(), 1 - self.decay)

    @torch.no_grad()
    def copy_to(self, model: nn.Module) -> nn.Module:
        """Overwrite a model's weights with the average; returns the model."""
        for name, value in model.named_parameters():
            value.copy_(self.values[name])
        return model

    def state_dict(self) -> dict[str, Any]:
        """Return the state for the checkpoint."""
        return {"decay": self.decay, "values": self.values}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of the checkpoint on this device."""
        self.values = {name: state["values"][name].to(value.device).clone() for name, value in self.values.items()}


@torch.no_grad()
def held_out_bpb(model: nn.Module, windows: Mapping[str, Tensor], weights: Mapping[str, int]) -> dict[str, float]:
    """Bits per byte by source, and their mean with the mixture's weights under `mixture`.

    Over all positions; the first bit of a window is predicted by nothing and counts as a coin flip.
    """
    device = next(model.parameters()).device
    found = {}
    for name, bits_NT in windows.items():
        total = float(len(bits_NT))  # in bits
        for bits_BT in torch.split(bits_NT.to(device), EVAL_BATCH):
            total += float(next_symbol_losses(model(bits_BT).logits_BTV, bits_BT).double().sum()) / math.log(2)
        found[name] = total * BITS_PER_BYTE / bits_NT.numel()
    mixture = sum(found[name] * weights[name] for name in found) / sum(weights[name] for name in found)
    return {**found, "mixture": mixture}


def copy_task(model: nn.Module, window_bytes: int) -> dict[str, float]:
    """Bits per byte of a random string's last copy after k = 0, 2, 4 earlier ones; keys `copy/0` …"""
    size = min(LONGEST_STRING, window_bytes // (max(COPIES) + 1))
    if size < 2:
        return {}
    dice = np.random.default_rng(0)
    drawn = LETTERS[dice.integers(0, len(LETTERS), size=(NUM_PROBES, max(COPIES) + 1, size))]
    found = {}
    for copies in COPIES:
        strings = drawn.copy()
        strings[:, max(COPIES) - copies :] = drawn[:, -1:]
        found[f"copy/{copies}"] = _last_bytes_bpb(model, strings.reshape(NUM_PROBES, -1), size)
    return found


def recall_task(model: nn.Module, window_bytes: int) -> dict[str, float]:
    """Bits of the value in `a=1;b=2;…;a=`, when its key was never shown (`recall/0`) and when it was (`recall/1`)."""
    pairs = window_bytes // 4 - 1
    if pairs < 2:
        return {}
    dice = np.random.default_rng(1)
    unseen, seen = [], []
    for _ in range(NUM_PROBES):
        keys = dice.permutation(LETTERS)[: min(pairs, 20) + 1]
        values = dice.integers(ord("0"), ord("9") + 1, size=len(keys)).astype(np.uint8)
        shown = b"".join(bytes([k, 61, v, 59]) for k, v in zip(keys[1:], values[1:], strict=True))
        chosen = int(dice.integers(1, len(keys)))
        seen.append(shown + bytes([keys[chosen], 61, values[chosen]]))
        unseen.append(shown + bytes([keys[0], 61, values[0]]))
    return {f"recall/{number}": _last_bytes_bpb(model, np.stack([np.frombuffer(text, dtype=np.uint8) for text in texts]), 1)
            for number, texts in ((0, unseen), (1, seen))}  # fmt: skip


@torch.no_grad()
def _last_bytes_bpb(model: nn.Module, windows: np.ndarray[Any, np.dtype[np.uint8]], num_last: int) -> float:
    device = next(model.parameters()).device
    bits = encode_bytes(torch.from_numpy(np.ascontiguousarray(windows))).long().to(device)
    losses = next_symbol_losses(model(bits).logits_BTV, bits)[:, -num_last * BITS_PER_BYTE :]
    return float(losses.double().sum() / math.log(2) / (len(windows) * num_last))


def digest_state(values: Mapping[str, Any]) -> str:
    """Hex sha256 over names and bytes of tensors (nested mappings and lists allowed): equal digests are equal bits."""
    digest = hashlib.sha256()
    _feed(digest, "", values)
    return digest.hexdigest()


def _feed(digest: Any, name: str, value: Any) -> None:
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            _feed(digest, f"{name}/{key}", value[key])
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            _feed(digest, f"{name}/{number}", item)
    elif isinstance(value, Tensor):
        digest.update(f"{name}:{value.dtype}:{tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    else:
        digest.update(f"{name}={value!r}".encode())

"""Text as bits: UTF-8 bytes, eight data bits (most significant first) and one parity bit each.

Parity is the sum of the eight data bits modulo 2. Tables of 256 rows do the work in both directions. What a model makes
of bits lives elsewhere.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

BITS_PER_BYTE = 9
COIN_FLIP_BITS_PER_BYTE = 9.0  # loss of a model that knows nothing, parity included


def _encode_table() -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    data = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)
    return np.concatenate([data, data.sum(axis=1, keepdims=True, dtype=np.uint8) % 2], axis=1)


_ENCODE = torch.from_numpy(_encode_table())
_PLACES = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1])


def encode_bytes(bytes_BN: Tensor) -> Tensor:
    """Expand uint8 bytes (…, n) into bits 0/1 (…, 9·n), int64."""
    table = _ENCODE.to(bytes_BN.device)
    return table[bytes_BN.long()].flatten(-2).long()


def decode_bits(bits_BT: Tensor) -> Tensor:
    """Return the bytes of bits (…, 9·n) as uint8 (…, n); parity is ignored. Raises ValueError on another length."""
    return (_grouped(bits_BT)[..., :8].long() * _PLACES.to(bits_BT.device)).sum(-1).to(torch.uint8)


def repair_parity(bits_BT: Tensor) -> tuple[Tensor, int]:
    """Set every ninth bit to the parity of its byte; return the bits and how many had to change."""
    groups = _grouped(bits_BT).clone()
    expected = groups[..., :8].sum(-1) % 2
    num_wrong = int((groups[..., 8] != expected).sum())
    groups[..., 8] = expected
    return groups.flatten(-2), num_wrong


def encode_text(text: str) -> Tensor:
    """Return the bits of a text, shape (9 · number of UTF-8 bytes,)."""
    return encode_bytes(torch.frombuffer(bytearray(text.encode()) or bytearray(1), dtype=torch.uint8)[: len(text.encode())])


def decode_text(bits_T: Tensor) -> str:
    """Return the text of bits; bytes that are not UTF-8 (a model may produce them) become U+FFFD."""
    return bytes(decode_bits(bits_T).tolist()).decode(errors="replace")


def _grouped(bits_BT: Tensor) -> Tensor:
    if bits_BT.shape[-1] % BITS_PER_BYTE:
        raise ValueError(f"{bits_BT.shape[-1]} bits are not a whole number of bytes of {BITS_PER_BYTE} bits")
    return bits_BT.view(*bits_BT.shape[:-1], -1, BITS_PER_BYTE)

"""Keyed permutations of [0, n): constant memory, any position in constant time.

A balanced Feistel network over the smallest even number of bits that holds n, walked along its cycle until the value
falls below n. A permutation for shuffling, not for secrecy. Nothing here knows sources, batches or steps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 4
_MULTIPLY_1 = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLY_2 = np.uint64(0xBF58476D1CE4E5B9)
_SHIFT_29 = np.uint64(29)
_SHIFT_32 = np.uint64(32)

Ids: TypeAlias = NDArray[np.int64]


def derive_key(*parts: object) -> int:
    """Return a 64-bit key of the parts; equal parts give equal keys on every machine and Python."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def permute(positions: Ids, n: int, key: int) -> Ids:
    """Map positions in [0, n) through the permutation of `key`; shape is kept. Raises ValueError outside [0, n)."""
    if n < 1:
        raise ValueError(f"permutation of {n} elements")
    if positions.size and (int(positions.min()) < 0 or int(positions.max()) >= n):
        raise ValueError(f"position outside [0, {n})")
    return _walk(positions.astype(np.uint64), n, _round_keys([key]))


def permute_rows(n: int, keys: Sequence[int]) -> Ids:
    """Return the whole permutation of [0, n) for each key, one a row: what `permute` of 0 … n − 1 gives, all at once."""
    rows = np.repeat(np.arange(n, dtype=np.uint64)[None], len(keys), axis=0)
    round_keys = [np.broadcast_to(column[:, None], rows.shape).ravel() for column in _round_keys(keys)]
    return _walk(rows.ravel(), n, round_keys).reshape(rows.shape)


def _round_keys(keys: Sequence[int]) -> list[NDArray[np.uint64]]:
    """One array a round, one entry a key."""
    return [np.array([derive_key(key, number) for key in keys], dtype=np.uint64) for number in range(_ROUNDS)]


def _walk(values: NDArray[np.uint64], n: int, round_keys: list[NDArray[np.uint64]]) -> Ids:
    """Encrypt until every value lies below n; round keys have one entry for all values, or one for each."""
    half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
    values = _encrypt(values, half_bits, round_keys)
    outside = values >= np.uint64(n)
    while outside.any():
        values[outside] = _encrypt(values[outside], half_bits, [
            keys if len(keys) == 1 else keys[outside] for keys in round_keys])
        outside = values >= np.uint64(n)
    return values.astype(np.int64)


def _encrypt(values: NDArray[np.uint64], half_bits: int, round_keys: list[NDArray[np.uint64]]) -> NDArray[np.uint64]:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for round_key in round_keys:
        mixed = (right ^ round_key) * _MULTIPLY_1
        mixed = (mixed ^ (mixed >> _SHIFT_29)) * _MULTIPLY_2
        left, right = right, left ^ ((mixed ^ (mixed >> _SHIFT_32)) & mask)
    return (left << shift) | right

"""Text without repeats: no 64-byte string occurs twice, so nothing that is held out is in the training text.

Of equal passages the first stays. What goes are whole lines (at most 256 bytes of a longer one), so that UTF-8 stays UTF-8;
where lines that met then make a repeat again, they go too, until there is none. Broder, "On the resemblance and containment
of documents", 1997, calls such strings shingles. Held-out text that overlaps the training text makes figures too good.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SHINGLE_BYTES = 64
_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64
_PIECE_BYTES = 256
_MOST_PASSES = 20


def without_repeats(text: bytes) -> bytes:
    """Return the text without the lines that repeat an earlier 64-byte string; the order stays."""
    for _ in range(_MOST_PASSES):
        repeated = repeated_positions(text)
        if not len(repeated):
            return text
        text = _without_lines(text, repeated + SHINGLE_BYTES // 2)
    raise AssertionError(f"repeats are left after {_MOST_PASSES} passes")


def repeated_positions(text: bytes) -> NDArray[np.int64]:
    """Return where a 64-byte string begins that began earlier in the text as well, ascending."""
    hashes = shingle_hashes(text)
    ordered = np.sort(hashes)
    several = ordered[1:][ordered[1:] == ordered[:-1]]
    place = np.flatnonzero(_is_among(hashes, several))  # few: only these are sorted with their places
    order = place[np.argsort(hashes[place], kind="stable")]
    return np.sort(order[1:][hashes[order[1:]] == hashes[order[:-1]]])


def shingle_hashes(text: bytes) -> NDArray[np.uint64]:
    """Return a 64-bit hash of each 64-byte string of the text, shape (max(0, len − 63),). Equal strings have equal hashes."""
    values = np.frombuffer(text, dtype=np.uint8)
    count = len(values) - SHINGLE_BYTES + 1
    if count <= 0:
        return np.empty(0, np.uint64)
    # Horner's rule over doubling lengths: the hash of 2n bytes from two of n bytes, modulo 2^64
    found, factor = values.astype(np.uint64) + np.uint64(1), np.uint64(_BASE)
    length = 1
    with np.errstate(over="ignore"):
        while length < SHINGLE_BYTES:
            found = found[:-length] * factor + found[length:]
            factor, length = factor * factor, 2 * length
        found ^= found >> np.uint64(29)  # the low bits of such a hash know only the last bytes
        found *= np.uint64(0xBF58476D1CE4E5B9)
    return found[:count]


def _is_among(hashes: NDArray[np.uint64], wanted: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Return whether each hash is one of `wanted`: a table of the upper bits first, which leaves few to compare."""
    table = np.zeros(1 << 22, dtype=bool)
    table[wanted >> np.uint64(42)] = True
    found: NDArray[np.bool_] = table[hashes >> np.uint64(42)]
    found[found] = np.isin(hashes[found], wanted)
    return found


def _without_lines(text: bytes, places: NDArray[np.int64]) -> bytes:
    """Return the text without the lines, or pieces of long lines, in which these positions lie."""
    values = np.frombuffer(text, dtype=np.uint8)
    ends = np.append(np.flatnonzero(values == 10) + 1, len(values))
    starts = np.unique(np.concatenate([[0], ends, *_cuts(values, ends)]))
    starts = starts[starts < len(values)]
    lengths = np.diff(np.append(starts, len(values)))
    kept = np.ones(len(starts), dtype=bool)
    kept[np.searchsorted(starts, places, "right") - 1] = False
    return bytes(values[np.repeat(kept, lengths)].tobytes())


def _cuts(values: NDArray[np.uint8], ends: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Return further starts inside lines of more than 256 bytes, at first bytes of characters."""
    firsts = np.concatenate([[0], ends[:-1]])
    found = []
    for line in np.flatnonzero(ends - firsts > _PIECE_BYTES):
        cuts = np.arange(firsts[line] + _PIECE_BYTES, ends[line], _PIECE_BYTES)
        while len(inside := np.flatnonzero(values[cuts] & 0xC0 == 0x80)):
            cuts[inside] -= 1
        found.append(cuts)
    return found

"""The CRC-32 of a large file after a few bytes changed, without reading the file.

CRC-32 is linear over GF(2): the CRC of the new bytes is that of the old ones, exclusive-or the (bare) CRC of the
difference, moved on by the number of bytes that follow it. Moving on by n zero bytes is a multiplication by x^(8n)
modulo the polynomial, done by squaring. Polynomial and bit order as in zlib (RFC 1952, section 8).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

_POLYNOMIAL = 0xEDB88320  # reflected: the highest power is the lowest bit
_ONE = 0x80000000


def crc32_after(crc: int, size_bytes: int, changes: Iterable[tuple[int, bytes, bytes]]) -> int:
    """CRC-32 of a file of `size_bytes` whose CRC-32 was `crc`, after each (offset, old, new) was written."""
    for offset, old, new in changes:
        difference = bytes(x ^ y for x, y in zip(old, new, strict=True))
        bare = zlib.crc32(difference) ^ zlib.crc32(bytes(len(difference)))  # start value and final inversion cancel out
        crc ^= _times(bare, _power(8 * (size_bytes - offset - len(old))))
    return crc


def crc32_combine(first: int, second: int, second_bytes: int) -> int:
    """CRC-32 of two pieces put together, from the CRC-32 of each and the length of the second."""
    return _times(first, _power(8 * second_bytes)) ^ second


def _times(a: int, b: int) -> int:
    """Product of two polynomials modulo the CRC's."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
    return product


def _power(exponent: int) -> int:
    """x to that power, modulo the polynomial."""
    result, square = _ONE, _ONE >> 1  # 1 and x
    while exponent:
        if exponent & 1:
            result = _times(result, square)
        square = _times(square, square)
        exponent >>= 1
    return result

"""Text → bits: eight data bits and their parity; a loss in bits is one in bits per byte."""

import math

import pytest
import torch

from bit_transformer.data.bits import BITS_PER_BYTE, encode_bytes
from bit_transformer.training.report import bits_per_byte


def test_every_byte_has_its_bits_and_their_parity() -> None:
    """Most significant bit first, parity last; no two bytes have the same bits."""
    bits = encode_bytes(torch.arange(256, dtype=torch.uint8)).view(256, BITS_PER_BYTE)
    assert bits[0b10000011].tolist() == [1, 0, 0, 0, 0, 0, 1, 1, 1]
    assert torch.equal(bits[:, 8], bits[:, :8].sum(1) % 2)
    assert torch.equal((bits[:, :8] * 2 ** torch.arange(7, -1, -1)).sum(1), torch.arange(256))


def test_a_byte_is_nine_bits_or_one_symbol() -> None:
    """A uniform guess costs nine bits a byte where bits are predicted (parity included), and eight where bytes are."""
    assert bits_per_byte(math.log(2)) == pytest.approx(9.0)
    assert bits_per_byte(math.log(256), 256) == pytest.approx(8.0)

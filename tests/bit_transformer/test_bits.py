"""Text ↔ bits: nothing is lost, parity is what it says, repairs are counted."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bit_transformer.data.bits import BITS_PER_BYTE, decode_bits, decode_text, encode_bytes, encode_text, repair_parity
from bit_transformer.training.report import bits_per_byte


def test_all_256_bytes_survive_the_round_trip() -> None:
    """Every byte comes back, most significant bit first, parity last."""
    every = torch.arange(256, dtype=torch.uint8)
    bits = encode_bytes(every)
    assert torch.equal(decode_bits(bits), every)
    assert bits.view(256, BITS_PER_BYTE)[0b10000011].tolist() == [1, 0, 0, 0, 0, 0, 1, 1, 1]
    assert torch.equal(bits.view(256, 9)[:, 8], bits.view(256, 9)[:, :8].sum(1) % 2)


@given(text=st.text())
def test_any_text_survives_the_round_trip(text: str) -> None:
    """Any Unicode text, the empty one too."""
    assert decode_text(encode_text(text)) == text


@given(wrong=st.sets(st.integers(0, 9)))
def test_repair_counts_exactly_the_wrong_parity_bits(wrong: set[int]) -> None:
    """Each flipped parity bit is set right and counted; data bits stay."""
    bits = encode_text("0123456789")
    damaged = bits.clone()
    for byte in wrong:
        damaged[byte * BITS_PER_BYTE + 8] ^= 1
    repaired, num_wrong = repair_parity(damaged)
    assert num_wrong == len(wrong)
    assert torch.equal(repaired, bits)


def test_a_torn_byte_is_refused() -> None:
    """Ten bits are no whole number of bytes."""
    with pytest.raises(ValueError, match="10 bits are not a whole number of bytes"):
        decode_bits(torch.zeros(10, dtype=torch.long))


def test_bytes_that_are_no_text_are_shown() -> None:
    """A model may produce invalid UTF-8; the reader sees where."""
    assert decode_text(encode_bytes(torch.tensor([65, 255, 66], dtype=torch.uint8))) == "A\ufffdB"


def test_a_byte_is_nine_bits_or_one_symbol() -> None:
    """A uniform guess costs nine bits a byte where bits are predicted (parity included), and eight where bytes are."""
    assert bits_per_byte(math.log(2)) == pytest.approx(9.0)
    assert bits_per_byte(math.log(256), 256) == pytest.approx(8.0)

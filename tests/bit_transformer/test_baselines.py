"""The yardsticks are right where the answer is known."""

import math

import numpy as np
import pytest

from bit_transformer.data.loaders import read_corpus
from bit_transformer.evaluation.held_out import added_bpb, baselines, compress_xz, compress_zstd, order_bpb


def test_unigram_of_two_equal_letters_is_one_bit() -> None:
    """Half `a`, half `b`: one bit a byte, up to the added counts."""
    assert order_bpb(b"ab" * 50_000, b"abba" * 10, 0) == pytest.approx(1.0, abs=0.01)


def test_random_bytes_cost_eight_bits_whatever_is_tried() -> None:
    """Nothing compresses noise."""
    rng = np.random.default_rng(0)
    train, held_out = rng.bytes(30_000), rng.bytes(10_000)
    assert order_bpb(train, held_out, 0) == pytest.approx(8, abs=0.15)
    assert order_bpb(train, held_out, 3) > 7.9 and added_bpb(compress_xz, train, held_out) > 7.99


def test_context_beats_letters_on_real_text() -> None:
    """Order 3 knows more than letter frequencies, and both more than the coin."""
    corpus = read_corpus("reference")
    found = baselines(corpus.train[:150_000], corpus.held_out[:8_000])
    assert found["order 3"] < found["unigram"] - 1 < 9 - 4
    assert 0.5 < found["xz"] < 4 and all(math.isfinite(value) for value in found.values())


def test_compressors_that_have_read_the_training_text_are_compared_with_a_model_that_has() -> None:
    """On 1.5 kB a compressor that starts cold says how short the text is; the same bytes after training text cost less."""
    corpus = read_corpus("code")
    train, held_out = corpus.train[:300_000], corpus.held_out[:1_536]
    for compress in (compress_xz, compress_zstd):
        assert added_bpb(compress, train, held_out) < added_bpb(compress, b"", held_out) - 0.5
    assert added_bpb(compress_zstd, train, train[1_000:3_000]) < 0.3  # what was read before costs next to nothing

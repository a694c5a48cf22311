"""Run-length form: nothing lost, the ramp as written, the draws a function of the plan."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bit_transformer.data.bits import (
    bits_to_runs,
    compress_runs,
    compress_window,
    compressed_rows,
    cosine_ramp,
    expand_runs,
    forward_compressed,
    runs_to_bits,
)
from bit_transformer.model.transformer import BitTransformer, ModelConfig


@given(runs=st.lists(st.integers(1, 600), max_size=8), first=st.integers(0, 1))
def test_round_trip_through_runs_and_their_bits(runs: list[int], first: int) -> None:
    """Any bits come back, runs longer than 255 and the empty sequence too."""
    bits = torch.tensor([(first + i) % 2 for i, n in enumerate(runs) for _ in range(n)], dtype=torch.long)
    values, lengths = compress_runs(bits)
    assert torch.equal(expand_runs(values, lengths), bits)
    back = bits_to_runs(runs_to_bits(values, lengths))
    assert torch.equal(back[0], values) and torch.equal(back[1], lengths)
    assert not lengths.numel() or int(lengths.max()) <= 255


def test_forward_of_runs_is_forward_of_the_bits() -> None:
    """The model cannot tell how its bits travelled."""
    torch.manual_seed(0)
    model = BitTransformer(ModelConfig(d_model=32, num_heads=4, num_layers=1, d_ff=32, max_bits=90)).eval()
    bits = torch.randint(0, 2, (90,))
    assert torch.equal(forward_compressed(model, *compress_runs(bits)).logits_BTV, model(bits[None]).logits_BTV)


def test_ramp_is_monotone_from_start_to_end() -> None:
    """0 at the first step, the end value at the last and for ever after, never falling."""
    values = [cosine_ramp(step, start=0.0, end=0.5, total_steps=100) for step in range(150)]
    assert values[0] == 0.0 and values[50] == pytest.approx(0.25) and values[100] == values[149] == 0.5
    assert all(a <= b for a, b in itertools.pairwise(values))


def test_draws_depend_on_the_position_only() -> None:
    """The same position draws the same rows, whoever asks and whenever; the share is the probability."""
    first = compressed_rows(seed=3, position=17, num_rows=16, probability=0.5)
    assert np.array_equal(first, compressed_rows(seed=3, position=17, num_rows=16, probability=0.5))
    share = np.mean([compressed_rows(seed=3, position=p, num_rows=16, probability=0.3) for p in range(400)])
    assert share == pytest.approx(0.3, abs=0.03)


def test_window_keeps_its_length_and_says_what_is_padding() -> None:
    """Shorter codes are padded, longer ones cut; the number of true bits comes along."""
    coded, used = compress_window(torch.zeros(90, dtype=torch.long))
    assert coded.numel() == 90 and used == 9
    coded, used = compress_window(torch.arange(90) % 2)
    assert coded.numel() == 90 and used == 90


def test_impossible_run_is_refused() -> None:
    """Length 0 stands for nothing."""
    with pytest.raises(ValueError, match="run lengths from 0 to 3"):
        expand_runs(torch.tensor([0, 1]), torch.tensor([0, 3]))

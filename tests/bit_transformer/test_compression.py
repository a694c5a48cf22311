"""Run-length form: nothing lost, the ramp as written, the draws a function of the plan."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bit_transformer.data.bits import (
    compress_runs,
    compress_window,
    compressed_rows,
    encode_bytes,
    runs_to_bits,
)
from bit_transformer.data.loaders import Batch, StepDataset, TextWindows, plan_data, read_corpus
from bit_transformer.errors import BadRecipe
from bit_transformer.recipes import DataConfig, find_recipe, with_settings
from bit_transformer.train import predicted_share
from bit_transformer.training.schedule import cosine_ramp
from bit_transformer.training.setup import require_compressible
from chronicle.data import Segments


@given(runs=st.lists(st.integers(1, 600), max_size=8), first=st.integers(0, 1))
def test_nothing_is_lost_in_runs_and_their_bits(runs: list[int], first: int) -> None:
    """Any bits come back from nine bits a run, runs longer than 255 and the empty sequence too."""
    bits = torch.tensor([(first + i) % 2 for i, n in enumerate(runs) for _ in range(n)], dtype=torch.long)
    rows = runs_to_bits(*compress_runs(bits)).view(-1, 9)
    lengths = (rows[:, 1:] << torch.arange(7, -1, -1)).sum(1)
    assert torch.equal(rows[:, 0].repeat_interleave(lengths), bits)
    assert not lengths.numel() or (int(lengths.min()) >= 1 and int(lengths.max()) <= 255)


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


def test_real_text_is_refused_with_the_figure_and_runs_are_not() -> None:
    """Bits of text change every second place: nine bits a run make it longer."""
    text = torch.from_numpy(np.frombuffer(read_corpus("reference").held_out[:8192], np.uint8).copy()).view(-1, 32)
    with pytest.raises(BadRecipe, match=r"0 of 256 windows of this data shorter: they become 4\.\d times as long"):
        require_compressible(text)
    require_compressible(torch.cat([text, torch.zeros(1, 32, dtype=torch.uint8)]))


def test_a_window_that_would_be_longer_stays_unless_that_is_asked_for() -> None:
    """A cut window is no compressed one."""
    text = bytes(range(256)) * 4 + bytes(1024)
    store = TextWindows("text", text, "d", 32)
    plan = plan_data((store,), {"text": 1}, batch_size=64, seed=0)

    def rows(longer: bool) -> tuple[int, int]:
        config = DataConfig(sources={"text": 1}, window_bytes=32, batch_size=64, compress_end=1.0, compress_longer=longer)
        batch = StepDataset(plan, Segments(), (store,), config, rank=0, world_size=1, as_bytes=False)[0]
        coded = torch.stack([batch.bits_BT[row] for row in range(64)])
        windows = [store.read(int(index)) for _, index in plan.block_ids(0, 1, Segments())[0]]
        plain = encode_bytes(torch.from_numpy(np.stack(windows)))
        return int((coded != plain).any(1).sum()), int((batch.num_bits_B < 288).sum())

    assert rows(longer=False) == (32, 32) and rows(longer=True)[0] == 64


def test_padded_rows_have_one_weight_whatever_the_number_of_parts() -> None:
    """The gradient of a batch with rows of unequal length does not depend on how it is accumulated."""
    torch.manual_seed(0)
    bits, num_bits = torch.randint(0, 2, (4, 18)), torch.tensor([18, 18, 5, 3])
    batch = Batch(step=0, bits_BT=bits, sources_B=torch.zeros(4, dtype=torch.long), num_bits_B=num_bits, digest="")
    losses = torch.rand(4, 17)
    whole = batch.without_padding(losses).sum() / batch.num_predicted_B().sum()
    for parts in (1, 2, 4):
        recipe = with_settings(find_recipe("demo"), [f"accumulation_steps={parts}", "batch_size=4"])
        share = predicted_share(batch, recipe)
        pieces = [part.without_padding(one).sum() / share
                  for part, one in zip(batch.split(parts), losses.chunk(parts), strict=True)]
        assert float(sum(pieces)) / parts == pytest.approx(float(whole), rel=1e-6)

"""Chunked attention equals the dense band mask; no T × T map unless somebody asks."""

import pytest
import torch

from bit_transformer.model.transformer import (
    CausalSelfAttention,
    attend_in_chunks,
    band_mask,
    chunk_masks,
)
from tests.bit_transformer.references import attend_explicitly


@pytest.mark.parametrize(("num_positions", "chunk", "overlap"), [
    (48, 16, 8), (50, 16, 8), (7, 16, 8), (33, 8, 8), (33, 8, 20), (40, 8, 0), (17, 16, 16), (1, 4, 2)])
def test_chunks_equal_the_dense_band(num_positions: int, chunk: int, overlap: int) -> None:
    """For T no multiple of the chunk, T below the chunk, overlap at or above the chunk: values and gradients agree."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, num_positions, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    fast = attend_in_chunks(q, k, v, chunk=chunk, overlap=overlap)
    dense = attend_explicitly(q, k, v, band_mask(num_positions, chunk, overlap, torch.device("cpu")))
    assert torch.allclose(fast, dense, atol=1e-10)
    weights = torch.randn_like(dense)
    for mine, reference in zip(torch.autograd.grad((fast * weights).sum(), (q, k, v)),
                               torch.autograd.grad((dense * weights).sum(), (q, k, v)), strict=True):
        assert torch.allclose(mine, reference, atol=1e-10)


def test_layer_uses_chunks_only_where_the_window_is_longer() -> None:
    """Up to one chunk, chunked and full attention are the same layer."""
    torch.manual_seed(0)
    full, chunked = CausalSelfAttention(32, 4), CausalSelfAttention(32, 4, chunk=16, overlap=4)
    chunked.load_state_dict(full.state_dict())
    short, long = torch.randn(2, 16, 32), torch.randn(2, 40, 32)
    assert torch.equal(full(short), chunked(short))
    assert not torch.allclose(full(long), chunked(long))


def test_map_on_request_is_what_the_layer_attends_to() -> None:
    """Rows sum to one, nothing outside the band, and weights times values give the layer's output."""
    torch.manual_seed(0)
    layer = CausalSelfAttention(32, 4, chunk=16, overlap=4)
    x = torch.randn(2, 40, 32)
    weights = layer.attention_map(x)
    assert torch.allclose(weights.sum(-1), torch.ones(2, 4, 40), atol=1e-5)
    assert weights[..., ~band_mask(40, 16, 4, torch.device("cpu"))].abs().max() == 0
    v = layer.in_proj(x).chunk(3, dim=-1)[2].unflatten(-1, (4, -1)).transpose(1, 2)
    assert torch.allclose(layer.out_proj((weights @ v).transpose(1, 2).flatten(2)), layer(x), atol=1e-5)


def test_a_repeated_shape_allocates_one_mask() -> None:
    """The same shape gives the same tensor, and the cache is bounded."""
    first = chunk_masks(3, 16, 8, torch.device("cpu"))
    assert chunk_masks(3, 16, 8, torch.device("cpu")) is first
    assert chunk_masks.cache_info().maxsize == 16

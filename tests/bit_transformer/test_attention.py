"""Chunked attention equals the dense band mask; no T × T map; rotary positions."""

import pytest
import torch

from bit_transformer.model.transformer import (
    CausalSelfAttention,
    ModelConfig,
    attend_in_chunks,
    chunk_masks,
    rotate,
)
from tests.bit_transformer.references import attend_explicitly, band_mask


@pytest.mark.parametrize(("num_positions", "chunk", "overlap"), [
    (48, 16, 8), (50, 16, 8), (7, 16, 8), (33, 8, 8), (33, 8, 20), (40, 8, 0), (17, 16, 16), (1, 4, 2)])
def test_chunks_equal_the_dense_band(num_positions: int, chunk: int, overlap: int) -> None:
    """For T no multiple of the chunk, T below the chunk, overlap at or above the chunk: values and gradients agree."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, num_positions, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    fast = attend_in_chunks(q, k, v, chunk=chunk, overlap=overlap)
    dense = attend_explicitly(q, k, v, band_mask(num_positions, chunk, overlap))
    assert torch.allclose(fast, dense, atol=1e-10)
    weights = torch.randn_like(dense)
    for mine, reference in zip(torch.autograd.grad((fast * weights).sum(), (q, k, v)),
                               torch.autograd.grad((dense * weights).sum(), (q, k, v)), strict=True):
        assert torch.allclose(mine, reference, atol=1e-10)


def layer_of(**more: object) -> CausalSelfAttention:
    torch.manual_seed(0)
    return CausalSelfAttention(ModelConfig(d_model=32, num_heads=4, num_layers=1, d_ff=32, max_bits=900, **more))


def test_layer_uses_chunks_only_where_the_window_is_longer() -> None:
    """Up to one chunk, chunked and full attention are the same layer."""
    full, chunked = layer_of(), layer_of(chunk=16, overlap=4)
    short, long = torch.randn(2, 16, 32), torch.randn(2, 40, 32)
    assert torch.equal(full(short), chunked(short))
    assert not torch.allclose(full(long), chunked(long))


def test_no_map_of_all_positions_by_all_positions_is_kept_in_chunks() -> None:
    """Playbook, task 12: with chunks nothing of T × T is kept for the backward pass."""
    layer, sizes = layer_of(chunk=16, overlap=8), []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        layer(torch.randn(1, 900, 32, requires_grad=True))
    assert sizes and max(sizes) < 900 * 900 / 4


@pytest.mark.parametrize("chunk", [0, 16])
def test_rotary_positions_are_relative_and_normed_queries_have_one_length(chunk: int) -> None:
    """Shifting all positions by one changes no score; a query ten times as long gives the same output."""
    q, k = (rotate(torch.randn(1, 1, 1, 8).expand(1, 1, 32, 8)) for _ in range(2))
    scores = (q @ k.transpose(-1, -2))[0, 0]
    assert torch.allclose(scores[:-1, :-1], scores[1:, 1:], atol=1e-4)
    layer = layer_of(rotary=True, qk_norm=True, chunk=chunk, overlap=chunk // 2)
    x = torch.randn(2, 40, 32)
    before = layer(x)
    with torch.no_grad():
        layer.in_proj.weight[:64] *= 10
        layer.in_proj.bias[:64] *= 10
    assert torch.allclose(layer(x), before, atol=1e-4)


def test_a_repeated_shape_allocates_one_mask() -> None:
    """The same shape gives the same tensor, and the cache is bounded."""
    first = chunk_masks(3, 16, 8, torch.device("cpu"))
    assert chunk_masks(3, 16, 8, torch.device("cpu")) is first
    assert chunk_masks.cache_info().maxsize == 16

"""INT8 and four-bit export stay close to what was trained; growth changes nothing the model computes."""

import dataclasses

import pytest
import torch

from bit_transformer.errors import BadRecipe
from bit_transformer.model.conversion import (
    QatLinear,
    convert_qat,
    export_int8,
    grow_depth,
    grow_width,
    prepare_qat,
    weight_bytes,
)
from bit_transformer.model.transformer import BitTransformer, ModelConfig, count_model_parameters, next_symbol_losses

CONFIG = ModelConfig(d_model=32, num_heads=4, num_layers=2, d_ff=64, max_bits=90, norm="pre")


@pytest.fixture(scope="module")
def trained() -> BitTransformer:
    """Forty steps on windows that repeat their first byte: enough for weights that mean something."""
    torch.manual_seed(0)
    model = BitTransformer(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(40):
        loss = _loss(model, _windows())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def _windows() -> torch.Tensor:
    return torch.randint(0, 2, (16, 9)).repeat(1, 10)


def _loss(model: BitTransformer, bits: torch.Tensor) -> torch.Tensor:
    return next_symbol_losses(model(bits).logits_BTV, bits).mean()


@pytest.mark.parametrize("reversible", [False, True])
def test_int8_is_smaller_and_within_two_percent(trained: BitTransformer, reversible: bool) -> None:
    """Held-out loss within 2 % of float32's, weights under a third of the bytes, logits close."""
    torch.manual_seed(1)
    bits = _windows()
    model = BitTransformer(dataclasses.replace(CONFIG, reversible=reversible))
    model.load_state_dict(trained.state_dict())
    small = export_int8(model)
    with torch.no_grad():
        assert _loss(small, bits).item() == pytest.approx(_loss(model, bits).item(), rel=0.02)
        assert (small(bits).logits_BTV - model(bits).logits_BTV).abs().max() < 0.6
    assert weight_bytes(small) < weight_bytes(model) / 3 + 4 * 32 * 20


def test_int8_equals_itself_for_few_rows(trained: BitTransformer) -> None:
    """One short window takes the path without the integer kernel and gives the same logits as in a batch."""
    small = export_int8(trained)
    torch.manual_seed(2)
    bits = _windows()[:, :9]
    with torch.no_grad():
        assert torch.allclose(small(bits[:1]).logits_BTV, small(bits).logits_BTV[:1], atol=1e-4)


def test_four_bit_training_learns_and_exports_close(trained: BitTransformer) -> None:
    """The fake quantiser lets the gradient through: the loss falls; the exported model is within 0.6 of it in logits."""
    torch.manual_seed(3)
    model = prepare_qat(trained)
    assert sum(isinstance(layer, QatLinear) for layer in model.modules()) == 4 * CONFIG.num_layers
    fixed = _windows()
    before = _loss(model, fixed).item()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(40):
        loss = _loss(model, fixed)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert _loss(model, fixed).item() < before - 0.05
    converted = convert_qat(model)
    assert len(torch.unique(converted.blocks[0].attention.in_proj.weight)) <= 16
    bits = _windows()
    with torch.no_grad():
        assert (export_int8(converted)(bits).logits_BTV - converted(bits).logits_BTV).abs().max() < 0.6


def test_deeper_model_computes_the_same(trained: BitTransformer) -> None:
    """Loss before = after within 1e-5, and the new blocks can learn: gradients reach them."""
    torch.manual_seed(4)
    bits = _windows()
    deep = grow_depth(trained, 4)
    assert _loss(deep, bits).item() == pytest.approx(_loss(trained, bits).item(), abs=1e-5)
    assert count_model_parameters(deep) == deep.config.num_parameters
    _loss(deep, bits).backward()
    assert deep.blocks[3].feedforward[2].weight.grad.norm() > 0


def test_wider_model_computes_the_same(trained: BitTransformer) -> None:
    """Twice the width, the same function within 1e-5."""
    torch.manual_seed(5)
    bits = _windows()
    wide = grow_width(trained)
    with torch.no_grad():
        assert (wide(bits).logits_BTV - trained(bits).logits_BTV).abs().max() < 1e-4
        assert _loss(wide, bits).item() == pytest.approx(_loss(trained, bits).item(), abs=1e-5)
    assert count_model_parameters(wide) == wide.config.num_parameters


def test_growth_that_would_lose_something_is_refused(trained: BitTransformer) -> None:
    """Fewer layers, or post-norm: said before anything is copied."""
    with pytest.raises(BadRecipe, match="from 2 to 1 layers"):
        grow_depth(trained, 1)
    with pytest.raises(BadRecipe, match="expected norm=pre"):
        grow_width(BitTransformer(dataclasses.replace(CONFIG, norm="post")))

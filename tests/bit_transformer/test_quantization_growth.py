"""INT8 export stays close to what was trained; growth changes nothing the model computes."""

import dataclasses
from typing import Any

import pytest
import torch

from bit_transformer.errors import BadRecipe
from bit_transformer.model.conversion import (
    QatLinear,
    export_int8,
    grow,
    prepare_qat,
    weight_bytes,
)
from bit_transformer.model.transformer import BitTransformer, ModelConfig, next_symbol_losses
from tests.bit_transformer.references import count_model_parameters

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
    """The fake quantiser lets the gradient through: the loss falls; the export has the rounded weights."""
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
    small = export_int8(model)
    for row in small.blocks[0].attention.in_proj.weight:  # the sixteen levels it was trained with, a scale a row
        assert len(torch.unique(row)) <= 16
    bits = _windows()
    with torch.no_grad():  # the export's inputs are finer than the four bits of training: the loss is what must agree
        assert _loss(small, bits).item() == pytest.approx(_loss(model, bits).item(), rel=0.05)


def test_deeper_model_computes_the_same(trained: BitTransformer) -> None:
    """Loss before = after within 1e-5, and the new blocks can learn: gradients reach them."""
    torch.manual_seed(4)
    bits = _windows()
    deep = grow(trained, "depth")
    assert _loss(deep, bits).item() == pytest.approx(_loss(trained, bits).item(), abs=1e-5)
    assert count_model_parameters(deep) == deep.config.num_parameters
    _loss(deep, bits).backward()
    assert deep.blocks[3].feedforward[2].weight.grad.norm() > 0


def test_wider_model_computes_the_same(trained: BitTransformer) -> None:
    """Twice the width, the same function within 1e-5."""
    torch.manual_seed(5)
    bits = _windows()
    wide = grow(trained, "width")
    with torch.no_grad():
        assert (wide(bits).logits_BTV - trained(bits).logits_BTV).abs().max() < 1e-5
        assert _loss(wide, bits).item() == pytest.approx(_loss(trained, bits).item(), abs=1e-5)
    assert count_model_parameters(wide) == wide.config.num_parameters


def test_a_wider_model_has_more_capacity_after_training(trained: BitTransformer) -> None:
    """The halves part, and matrices and residual stream have a higher rank than the small model can have."""
    torch.manual_seed(6)
    wide = grow(trained, "width")
    assert torch.equal(wide.blocks[0].feedforward[0].weight, grow(trained, "width").blocks[0].feedforward[0].weight)
    optimizer = torch.optim.AdamW(wide.parameters(), lr=1e-3)
    for _ in range(40):
        loss = _loss(wide, _windows())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    wide.eval()
    width = trained.config.d_model
    for name, value in wide.named_parameters():
        if name != "head.bias":
            one, other = value.detach().chunk(2, 1 if name in ("embedding.weight", "head.weight") else 0)
            assert (one - other).abs().max() > 1e-3, name
        if value.dim() == 2 and min(value.shape) > width:
            assert _rank(value) > 1.5 * width, f"{name} has rank {_rank(value)} of {min(value.shape)}"
    seen: list[torch.Tensor] = []
    wide.head.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].detach().flatten(0, -2)))
    with torch.no_grad():
        wide(torch.randint(0, 2, (32, 90)))
    one, other = seen[0].chunk(2, 1)
    assert _rank(one - other) >= 8 and (one - other).norm() > 0.01 * one.norm()


def _rank(matrix: torch.Tensor) -> int:
    """Singular values above a thousandth of the largest."""
    values = torch.linalg.svdvals(matrix.detach().double())
    return int((values > 1e-3 * values[0]).sum())


@pytest.mark.parametrize("make", [export_int8, prepare_qat], ids=lambda make: str(make.__name__))
def test_a_quantised_model_sees_neither_the_future_nor_the_rest_of_the_batch(trained: BitTransformer, make: Any) -> None:
    """Logits before a changed bit stay equal, at every position, and a window alone is a window in a batch."""
    torch.manual_seed(7)
    model, bits = make(trained).eval(), torch.randint(0, 2, (1, 90))
    with torch.no_grad():
        logits = model(bits).logits_BTV
        for position in range(1, 90):
            changed = torch.cat([bits[:, :position], 1 - bits[:, position:]], 1)
            assert (model(changed).logits_BTV[:, :position] - logits[:, :position]).abs().max() < 1e-5, position
        batch = torch.cat([bits, torch.randint(0, 2, (7, 90))])
        assert (model(batch).logits_BTV[:1] - logits).abs().max() < 1e-4


@pytest.mark.parametrize("kind", ["depth", "width"])
def test_growth_that_would_lose_something_is_refused(kind: str) -> None:
    """Post-norm: said before anything is copied."""
    with pytest.raises(BadRecipe, match=f"cannot grow in {kind}: expected norm=pre"):
        grow(BitTransformer(dataclasses.replace(CONFIG, norm="post")), kind)

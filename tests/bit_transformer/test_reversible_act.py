"""Reversible blocks have the gradients of ordinary ones and constant memory; ACT stops where it should."""

import dataclasses

import pytest
import torch

from bit_transformer.errors import BadRecipe
from bit_transformer.model.transformer import (
    BitTransformer,
    HaltingState,
    ModelConfig,
    next_symbol_losses,
    run_reversibly,
)

CONFIG = ModelConfig(d_model=32, num_heads=4, num_layers=4, d_ff=64, max_bits=90, norm="pre", reversible=True)


def _loss(model: BitTransformer, bits: torch.Tensor) -> torch.Tensor:
    output = model(bits)
    return next_symbol_losses(output.logits_BTV, bits).mean() + 0.1 * output.ponder


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_gradients_equal_those_of_autograd(dtype: torch.dtype, bound: float) -> None:
    """Rebuilt inputs give the gradients that stored ones give."""
    torch.manual_seed(0)
    blocks = BitTransformer(CONFIG).to(dtype).blocks
    x1, x2 = (torch.randn(2, 45, 32, dtype=dtype, requires_grad=True) for _ in range(2))
    y1, y2 = x1, x2
    for block in blocks:
        y1 = y1 + block.attention_branch(y2)
        y2 = y2 + block.feedforward_branch(y1)
    inputs = [x1, x2, *blocks.parameters()]
    expected = torch.autograd.grad((y1 * y2.cos()).sum(), inputs)
    z1, z2 = run_reversibly(list(blocks), x1, x2)
    actual = torch.autograd.grad((z1 * z2.cos()).sum(), inputs)
    for mine, reference in zip(actual, expected, strict=True):
        assert (mine - reference).norm() <= bound * reference.norm().clamp(min=1e-3)


def _saved_bytes(config: ModelConfig) -> int:
    torch.manual_seed(0)
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    model, bits = BitTransformer(config), torch.randint(0, 2, (4, 90))
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _loss(model, bits)
    return sum(size for pointer, size in saved.items() if pointer not in own)


def test_saved_activations_do_not_grow_with_depth() -> None:
    """Eight more layers keep not one byte more; ordinary blocks keep many."""
    shallow, deep = (dataclasses.replace(CONFIG, num_layers=layers) for layers in (4, 12))
    assert _saved_bytes(deep) == _saved_bytes(shallow)
    ordinary = [dataclasses.replace(config, reversible=False) for config in (shallow, deep)]
    assert _saved_bytes(ordinary[1]) > 2.5 * _saved_bytes(ordinary[0])


def test_checkpointing_changes_no_gradient() -> None:
    """The boring alternative gives the same loss and gradients as keeping everything."""
    bits = torch.randint(0, 2, (2, 90), generator=torch.Generator().manual_seed(1))
    found = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = BitTransformer(dataclasses.replace(CONFIG, reversible=False, checkpointing=checkpointing))
        _loss(model, bits).backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_reversible_with_post_norm_is_refused() -> None:
    """Post-norm cannot be undone; the recipe says so before anything is built."""
    with pytest.raises(BadRecipe, match="reversible blocks need norm=pre"):
        dataclasses.replace(CONFIG, norm="post")


def _halting_model(threshold: float, **change: object) -> BitTransformer:
    torch.manual_seed(0)
    return BitTransformer(dataclasses.replace(CONFIG, act=True, act_threshold=threshold, reversible=False, **change))


def test_low_threshold_stops_early_and_one_never() -> None:
    """Threshold 0.1 stops after the first layer (cost 1 + 1); 1.0 runs all four."""
    bits = torch.randint(0, 2, (2, 90))
    assert _halting_model(0.1)(bits).ponder.item() == pytest.approx(2.0)
    assert _halting_model(1.0)(bits).ponder.item() > 4


def test_halting_weights_sum_to_one() -> None:
    """The output is an average of the layers' states: constant states come out unchanged."""
    state, x = HaltingState(torch.ones(2, 5, 8), 0.9, 3), torch.full((2, 5, 8), 3.0)
    for layer, p in enumerate((0.3, 0.5, 0.7)):
        state.take(layer, x, torch.full((2, 5), p))
    assert torch.allclose(state.output_BTD, x) and not state.running_BT.any()
    assert state.cost_BT.mean().item() == pytest.approx(3 + 0.2)


@pytest.mark.parametrize("reversible", [False, True])
def test_gradient_reaches_every_halting_unit_that_ran(reversible: bool) -> None:
    """A unit without gradient would never learn when to stop."""
    torch.manual_seed(0)
    model = BitTransformer(dataclasses.replace(CONFIG, act=True, reversible=reversible))
    _loss(model, torch.randint(0, 2, (2, 90))).backward()
    assert all(unit.weight.grad is not None and unit.weight.grad.norm() > 0 for unit in model.halting[:-1])


@pytest.mark.parametrize("act", [False, True])
def test_reversible_under_bf16_autocast_stays_close(act: bool) -> None:
    """Autocast in the branches, float32 in the streams: gradients within 5 % of float32's."""
    bits = torch.randint(0, 2, (4, 90), generator=torch.Generator().manual_seed(1))
    gradients = []
    for enabled in (False, True):
        torch.manual_seed(0)
        model = BitTransformer(dataclasses.replace(CONFIG, act=act))
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = _loss(model, bits)
        loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert (gradients[0] - gradients[1]).norm() < 0.05 * gradients[0].norm()

"""The compile gate answers with a reason, never with a traceback, and leaves the generators alone."""

import copy
import dataclasses
import shutil

import pytest
import torch

from bit_transformer.model.transformer import BitTransformer, ModelConfig, next_symbol_losses
from bit_transformer.training import setup

CONFIG = ModelConfig(d_model=32, num_heads=4, num_layers=2, d_ff=32, max_bits=90, norm="pre")


def test_missing_compiler_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the compiler throws, the model stays as it is and the reason is one line."""
    def refuse(*arguments: object, **options: object) -> None:
        raise RuntimeError("no C++ compiler found\nsecond line")

    monkeypatch.setattr(torch, "compile", refuse)
    model = BitTransformer(CONFIG)
    assert setup.compile_where_possible(model, torch.device("cpu")) == "RuntimeError: no C++ compiler found"
    assert all(block._compiled_call_impl is None for block in model.blocks)


def test_reversible_model_is_not_compiled() -> None:
    """Its backward pass is its own."""
    model = BitTransformer(dataclasses.replace(CONFIG, reversible=True))
    reason = setup.compile_where_possible(model, torch.device("cpu"))
    assert reason == "reversible blocks have their own backward pass"


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("c++") or shutil.which("g++")), reason="no C++ compiler: the other test has the reason")
def test_compiled_blocks_compute_and_learn_the_same() -> None:
    """Where there is a compiler the blocks are compiled, with the logits and gradients of the model as written."""
    torch.manual_seed(0)
    model = BitTransformer(CONFIG)
    plain = copy.deepcopy(model)
    state = torch.get_rng_state()
    assert setup.compile_where_possible(model, torch.device("cpu")) is None
    assert torch.equal(torch.get_rng_state(), state)
    assert all(block._compiled_call_impl is not None for block in model.blocks)
    bits = torch.randint(0, 2, (4, 90))
    losses = [next_symbol_losses(one(bits).logits_BTV, bits).mean() for one in (model, plain)]
    assert torch.allclose(*losses, atol=1e-6)
    for loss in losses:
        loss.backward()
    for mine, reference in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None and reference.grad is not None
        assert torch.allclose(mine.grad, reference.grad, atol=1e-5)

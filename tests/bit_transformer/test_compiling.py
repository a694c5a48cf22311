"""The compile gate answers with a reason, never with a traceback, and leaves the generators alone."""

import dataclasses

import pytest
import torch

from bit_transformer import compiling
from bit_transformer.model import BitTransformer, ModelConfig

CONFIG = ModelConfig(d_model=32, num_heads=4, num_layers=2, d_ff=32, max_bits=90, norm="pre")


def test_missing_compiler_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the compiler throws, the model stays as it is and the reason is one line."""
    def refuse(*arguments: object, **options: object) -> None:
        raise RuntimeError("no C++ compiler found\nsecond line")

    monkeypatch.setattr(torch, "compile", refuse)
    model = BitTransformer(CONFIG)
    assert compiling.compile_where_possible(model, torch.device("cpu")) == "RuntimeError: no C++ compiler found"
    assert all(block._compiled_call_impl is None for block in model.blocks)


def test_reversible_model_is_not_compiled() -> None:
    """Its backward pass is its own."""
    reason = compiling.why_not_compile(dataclasses.replace(CONFIG, reversible=True), torch.device("cpu"))
    assert reason == "reversible blocks run their own backward pass"

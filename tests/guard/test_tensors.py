"""Norms and digests of tensors, however they lie in memory."""

import pytest
import torch

from chronicle.resume.fingerprint import norm


def test_norm_of_every_layout_and_type_is_the_norm_of_the_numbers() -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(1000), torch.randn(10, 20).t(), torch.randn(30).bfloat16(), torch.randn(0), torch.randn(5).double()]
    exact = sum(float((t.double() ** 2).sum()) for t in tensors) ** 0.5
    assert norm(tensors) == pytest.approx(exact, rel=1e-4)
    assert norm([]) is None
    assert norm([torch.zeros(0)]) == 0.0
    bad = norm([torch.tensor([1.0, float("nan")])])
    assert bad is not None and bad != bad

"""Norms and digests of tensors, however they lie in memory."""

from typing import Any

import pytest
import torch

from chronicle.resume.fingerprint import norm, own_shard, tensor_digest


class Packed(torch.Tensor):
    """Like torchao's moments of eight bits: its values lie in another tensor, and hardly an operation is known."""

    codes: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor) -> "Packed":
        made: Packed = torch.Tensor._make_wrapper_subclass(cls, codes.shape)  # type: ignore[attr-defined]
        made.codes = codes
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes"], None

    def dequantize(self) -> torch.Tensor:
        return self.codes.float() / 100

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(function)


def test_packed_tensors_are_compared_by_their_values() -> None:
    first, other = (Packed(torch.arange(start, start + 64)) for start in (0, 1))
    assert norm([first]) == pytest.approx(float((torch.arange(64.0) / 100).norm()))
    assert tensor_digest([own_shard(first)]) != tensor_digest([own_shard(other)])


def test_norm_of_every_layout_and_type_is_the_norm_of_the_numbers() -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(1000), torch.randn(10, 20).t(), torch.randn(30).bfloat16(), torch.randn(0), torch.randn(5).double()]
    exact = sum(float((t.double() ** 2).sum()) for t in tensors) ** 0.5
    assert norm(tensors) == pytest.approx(exact, rel=1e-4)
    assert norm([]) is None
    assert norm([torch.zeros(0)]) == 0.0
    bad = norm([torch.tensor([1.0, float("nan")])])
    assert bad is not None and bad != bad

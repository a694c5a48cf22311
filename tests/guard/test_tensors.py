"""Digests of tensors, however they lie in memory."""

from typing import Any

import torch

from chronicle.resume.samples import own_shard, tensor_digest


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
    assert tensor_digest([own_shard(first)]) != tensor_digest([own_shard(other)])

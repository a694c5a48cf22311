"""Tensors as numbers that can be compared: norms, and a hash of a strided sample. Nothing is written or drawn."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["digest", "local_part", "norm", "plain_bytes", "tensor_digest"]

SAMPLES = 64  # elements per tensor


def local_part(tensor: Any) -> Any:
    """This rank's part of a distributed tensor (DTensor, ZeRO-3 parameter); other tensors as they are."""
    if hasattr(tensor, "ds_tensor"):
        return tensor.ds_tensor
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def norm(tensors: Sequence[Any]) -> float | None:
    import torch

    if not tensors:
        return None
    total = 0.0
    own = [local_part(tensor) for tensor in tensors]
    for device in {tensor.device for tensor in own}:
        parts = torch._foreach_norm([t.detach() for t in own if t.device == device and t.numel()])
        total += float(sum(part.double() ** 2 for part in parts)) if parts else 0.0
    return float(total**0.5)


def tensor_digest(tensors: Iterable[Any]) -> str:
    """Hash of a strided sample of every tensor, bit for bit, with shapes and dtypes; "" for no tensors."""
    import torch

    shapes: list[str] = []
    samples: dict[tuple[Any, Any], list[Any]] = {}
    for tensor in tensors:
        shapes.append(f"{tuple(tensor.shape)}{tensor.dtype}")
        size = tensor.numel()
        if size:
            flat = tensor.detach().reshape(-1)[:: max(1, size // SAMPLES)][:SAMPLES]
            samples.setdefault((tensor.device, tensor.dtype), []).append(flat)
    if not shapes:
        return ""
    digest = hashlib.sha256("|".join(shapes).encode())
    for parts in samples.values():
        digest.update(torch.cat(parts).contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def plain_bytes(thing: Any) -> bytes:
    """A state of plain values and tensors as bytes that are equal for equal states; other objects by their type."""
    if isinstance(thing, Mapping):
        parts = [repr(key).encode() + b":" + plain_bytes(thing[key]) for key in sorted(thing, key=repr)]
        return b"{" + b",".join(parts) + b"}"
    if isinstance(thing, (tuple, list)):
        return b"[" + b",".join(plain_bytes(item) for item in thing) + b"]"
    if hasattr(thing, "numel") and hasattr(thing, "detach"):
        return tensor_digest((local_part(thing),)).encode()
    if thing is None or isinstance(thing, (bool, int, float, str, bytes)):
        return repr(thing).encode()
    return type(thing).__name__.encode()


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]

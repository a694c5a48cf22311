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
    """Euclidean norm over all of them, each rank's own part; None for no tensors.

    On the CPU as dot products: one pass on all threads, where torch's norms take one thread.
    """
    import torch

    if not tensors:
        return None
    own = [part.detach() for tensor in tensors if (part := local_part(tensor)).numel()]
    dotted = [t for t in own if t.device.type == "cpu" and t.dtype in (torch.float32, torch.float64) and t.is_contiguous()]
    total = sum((float(torch.dot(flat, flat)) for flat in (t.view(-1) for t in dotted)), 0.0)
    known = {id(t) for t in dotted}
    rest = [t for t in own if id(t) not in known]
    for device in {t.device for t in rest}:
        parts = torch._foreach_norm([t for t in rest if t.device == device])
        total += float(sum(part.double() ** 2 for part in parts))
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

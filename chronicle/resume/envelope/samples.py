"""Small samples of many tensors, read without waiting for the device: a few elements of each at a fixed stride.

On an accelerator the sample is copied to pinned memory asynchronously and read at a later step. No element is read by
`.item()`, and no tensor is copied as a whole.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from chronicle.resume.fingerprint import own_shard

__all__ = ["Later", "Reading", "Snapshot", "part_of"]

ELEMENTS = 16  # per tensor


def part_of(tensor: Any, elements: int = ELEMENTS) -> Any:
    """A view of at most `elements` elements, spread over the tensor; None where it has none (empty, sparse, meta)."""
    own = own_shard(tensor)
    if own is None or own.is_sparse or own.is_meta or str(own.layout) != "torch.strided":
        return None
    own, size = own.detach(), own.numel()
    if size == 0:
        return None
    if size <= elements:
        return own.reshape(-1)
    if own.is_contiguous():
        return own.as_strided((elements,), (size // elements,), own.storage_offset())
    return _thinned(own, elements)


def _thinned(tensor: Any, elements: int) -> Any:
    """Every n-th index of each dimension, so that no copy of the whole is made."""
    left = elements
    steps: list[slice] = []
    for length in tensor.shape:
        kept = max(1, min(length, math.isqrt(left) if len(steps) < tensor.dim() - 1 else left))
        steps.append(slice(None, None, max(1, length // kept)))
        left = max(1, left // kept)
    return tensor[tuple(steps)].reshape(-1)[:elements]


class Snapshot:
    """Samples of some tensors as they are now: copies, one per device, in the order given. An absent tensor has length 0."""

    def __init__(self, tensors: Sequence[Any]) -> None:
        import torch

        self.lengths: list[int] = []
        self._slots: list[tuple[Any, int]] = []  # device and place in its copy
        self._copies: dict[Any, Any] = {}
        parts: dict[Any, list[Any]] = {}
        places: dict[Any, int] = {}
        with torch.no_grad():
            for tensor in tensors:
                part = None if tensor is None else part_of(tensor)
                if part is None:
                    self.lengths.append(0)
                    self._slots.append((None, 0))
                    continue
                device = part.device
                self.lengths.append(len(part))
                self._slots.append((device, places.get(device, 0)))
                places[device] = places.get(device, 0) + len(part)
                parts.setdefault(device, []).append(part)
            for device, some in parts.items():
                self._copies[device] = Reading(torch.cat(some))

    @property
    def ready(self) -> bool:
        """Whether everything has arrived on the host."""
        return all(reading.ready for reading in self._copies.values())

    def rows(self) -> list[Any]:
        """One numpy array of float64 per tensor; waits for what has not arrived."""
        arrays = {device: reading.array() for device, reading in self._copies.items()}
        return [
            arrays[device][place : place + length] if length else None
            for (device, place), length in zip(self._slots, self.lengths, strict=True)
        ]

    def bytes(self) -> bytes:
        """All samples as bytes, for a digest; waits for what has not arrived."""
        return b"".join(reading.array().tobytes() for _, reading in sorted(self._copies.items(), key=lambda one: str(one[0])))


class Reading:
    """One tensor on its way to the host."""

    def __init__(self, tensor: Any) -> None:
        import torch

        self._event: Any = None
        if tensor.device.type == "cpu":
            self._host = tensor
            return
        if tensor.device.type != "cuda":
            self._host = tensor.cpu()
            return
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(tensor.device))

    @property
    def ready(self) -> bool:
        """Whether `array` returns at once."""
        return self._event is None or bool(self._event.query())

    def array(self) -> Any:
        """The values as float64."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._host.double().numpy()


class Later:
    """Work that waits for its samples: done in order, as soon as they have arrived."""

    def __init__(self) -> None:
        self._waiting: list[tuple[tuple[Snapshot, ...], Callable[[], None]]] = []

    def add(self, snapshots: tuple[Snapshot, ...], work: Callable[[], None]) -> None:
        """Do `work` once these snapshots are there: now, where they are."""
        self._waiting.append((snapshots, work))
        self.run()

    def run(self, *, wait: bool = False) -> None:
        """Do what can be done; with `wait` everything."""
        while self._waiting and (wait or all(snapshot.ready for snapshot in self._waiting[0][0])):
            self._waiting.pop(0)[1]()

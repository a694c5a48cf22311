"""M4: which data a launch really begins with, seen where it enters the model.

Three batches after every save and the first three of every launch are hashed (a strided sample of each tensor); they
stand in the journal as `guard.batches`. A resume whose first batch is the one that followed the checkpoint continues
the data; one that begins like a launch from scratch starts the data again. Anything else is another order: said in the
verdict, refused only where the trainer promised the same order. Outside these windows the hook returns at once.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

__all__ = ["BatchWitness", "batch_digest"]

NUM_BATCHES = 3
SAMPLES = 64


class BatchWitness:
    """Collects digests of model inputs in short windows; `report(key, digests)` gets each full window."""

    def __init__(self, report: Callable[[str, tuple[str, ...]], None]) -> None:
        self._report = report
        self._key: str | None = "start"
        self._digests: list[str] = []
        self._watched: set[int] = set()
        self.first: tuple[str, ...] = ()  # of this launch

    def watch(self, model: Any) -> None:
        """Look at what goes into this model in training mode; a compiled one is left alone (a hook would recompile it)."""
        if id(model) in self._watched or hasattr(model, "_orig_mod"):
            return
        self._watched.add(id(model))
        model.register_forward_pre_hook(self._before_forward, with_kwargs=True)

    def after_save(self, key: str) -> None:
        """Begin a window: the next batches are those that follow this checkpoint."""
        self.flush()
        self._key, self._digests = key, []

    def flush(self) -> None:
        """Report a window that did not get full."""
        if self._key is not None and self._digests:
            self._close()

    def _before_forward(self, module: Any, args: Any, kwargs: Any) -> None:
        if self._key is None or not module.training:
            return
        self._digests.append(batch_digest(args, kwargs))
        if self._key == "start":
            self.first = tuple(self._digests)
        if len(self._digests) >= NUM_BATCHES:
            self._close()

    def _close(self) -> None:
        key, digests = self._key, tuple(self._digests)
        self._key, self._digests = None, []
        if key is not None:
            self._report(key, digests)


def batch_digest(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Hash of a strided sample of all tensors among a model's inputs, with their shapes."""
    digest = hashlib.sha256()
    for tensor in _tensors((args, dict(kwargs))):
        flat = tensor.detach().reshape(-1)
        digest.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
        sample = flat[:: max(1, flat.numel() // SAMPLES)][:SAMPLES]
        digest.update(repr(sample.tolist()).encode())
    return digest.hexdigest()[:16]


def _tensors(thing: Any) -> Iterator[Any]:
    if hasattr(thing, "numel") and hasattr(thing, "detach"):
        yield thing
    elif isinstance(thing, Mapping):
        for key in sorted(thing, key=str):
            yield from _tensors(thing[key])
    elif isinstance(thing, (tuple, list)):
        for item in thing:
            yield from _tensors(item)

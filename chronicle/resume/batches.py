"""M4: which data a launch really begins with, seen where it enters the model.

Three batches after every save and the first three of every launch are hashed (a strided sample of each tensor); they
stand in the journal as `guard.batches`. A resume whose first batch is the one that followed the checkpoint continues
the data; one that begins like a launch from scratch starts the data again. Anything else is another order: said in the
verdict, refused only where the trainer promised the same order. Outside these windows there is no hook.
"""

import hashlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

__all__ = ["BatchWitness", "batch_digest"]

NUM_BATCHES = 3
SAMPLES = 64


class BatchWitness:
    """Collects digests of model inputs in short windows; `report(key, digests)` gets each full window.

    `first_batch()` is called when the first batch of the launch is about to enter the model.
    """

    def __init__(
        self, report: Callable[[str, tuple[str, ...]], None], first_batch: Callable[[], None] = lambda: None
    ) -> None:
        self._report, self._first_batch = report, first_batch
        self._key: str | None = "start"
        self._digests: list[str] = []
        self._model: weakref.ref[Any] | None = None
        self._handle: Any = None
        self.first: tuple[str, ...] = ()  # of this launch

    def watch(self, model: Any) -> None:
        """Look at what goes into this model in training mode; a compiled one is left alone (a hook would recompile it)."""
        if self._model is None and not hasattr(model, "_orig_mod"):
            self._model = weakref.ref(model)
            _witnesses[model] = self
            self._open()

    def after_save(self, key: str) -> None:
        """Begin a window: the next batches are those that follow this checkpoint."""
        self.flush()
        self._key, self._digests = key, []
        self._open()

    def flush(self) -> None:
        """Report a window that did not get full."""
        if self._key is not None and self._digests:
            self._close()

    def see(self, args: Any, kwargs: Any) -> None:
        """One batch enters the model."""
        if self._key is None:
            return
        if self._key == "start" and not self._digests:
            self._first_batch()
        self._digests.append(batch_digest(args, kwargs))
        if self._key == "start":
            self.first = tuple(self._digests)
        if len(self._digests) >= NUM_BATCHES:
            self._close()

    def _open(self) -> None:
        model = self._model() if self._model is not None else None
        if model is not None and self._handle is None and self._key is not None:
            self._handle = model.register_forward_pre_hook(_before_forward, with_kwargs=True)

    def _close(self) -> None:
        key, digests = self._key, tuple(self._digests)
        self._key, self._digests = None, []
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        if key is not None:
            self._report(key, digests)


# A plain function on the module and the rest beside it: a model under guard can still be deep-copied and pickled,
# and what is copied is not watched.
_witnesses: "weakref.WeakKeyDictionary[Any, BatchWitness]" = weakref.WeakKeyDictionary()


def _before_forward(module: Any, args: Any, kwargs: Any) -> None:
    witness = _witnesses.get(module)
    if witness is not None and module.training:
        witness.see(args, kwargs)


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

"""Observes the batches that enter the model: a digest of each, and where its loader stands.

A batch is what a forward pass in training mode with gradients gets: an evaluation, a generation and the first run of a
checkpointed block are none. A hook on the model sees it, or the call of its compiled form (`compiled.py`), or an adapter hands
it over (Lightning). The digest is 64 bits of a strided sample of each tensor. Samples of a batch on a device are read later,
many at once, so that no step waits for the device.
"""

import contextlib
import functools
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from chronicle.resume.compiled import ModelHook, compiled_part, see_compiled_calls
from chronicle.resume.events import BatchEntered, Inputs
from chronicle.resume.faults import shield
from chronicle.resume.patches import change
from chronicle.resume.samples import SAMPLES, array_bytes, digest_of, part_of, raw_bytes
from chronicle.resume.training import Training

NUM_LOOKS = 3
NUM_TENSORS = 16  # of one batch
NUM_YIELDED = 3
NUM_DEFERRED = 256  # batches on a device whose samples wait to be read
DEPTH = 6


class BatchWitness:
    """Tells of all that enters a model, and `see(digest, place, step)` of every batch of the training, `step` being the step
    of the training at that moment."""

    def __init__(
        self, training: Training, tell: Callable[[BatchEntered], object], see: Callable[[int, int, int | None], None]
    ) -> None:
        self._training, self._tell, self._see = training, tell, see
        self._watches = False
        self._handle: Any = None
        self._begun = False
        self.is_deaf = False  # the guard itself calls the model
        self._deferred: list[tuple[list[Any], int, int | None]] = []
        self._places = Places()
        self._gave_up = False
        self._looks_left = NUM_LOOKS

    @property
    def has_seen(self) -> bool:
        """Whether any batch entered the model in this launch."""
        return self._begun

    @property
    def num_waiting(self) -> int:
        """Batches that `see` has not been told of yet."""
        return len(self._deferred)

    def watch(self, model: Any) -> None:
        """Observe the inputs of this model; a compiled one is looked at from outside its graph."""
        with self._training.contained("batches"):
            if self._watches:
                return
            self._watches, model = True, compiled_part(model)
            _watched[model] = self
            watch_loaders()
            see_compiled_calls(model, shield(self._before_compiled, self.failed))
            self._handle = model.register_forward_pre_hook(_hook(_before_model), with_kwargs=True)
            if type(model).forward is sys.modules["torch"].nn.Module.forward:  # a `ModuleDict`: only its parts are called
                for part in model.children():
                    _watched[part] = self
                    part.register_forward_pre_hook(_hook(_before_part), with_kwargs=True)

    def failed(self, problem: Exception) -> None:
        """Looking at a batch failed: no more batches are looked at, because the count of batches would be wrong."""
        self._gave_up = True
        self._unhook()
        self._training.faults.record("batch", problem)

    def take(self, batch: Any, call: tuple[Any, Any, Any] | None = None) -> None:
        """A batch of the training, in any form. `call`: the model that it enters, and with what."""
        if self._gave_up:
            return
        is_first, self._begun = not self._begun, True
        samples = samples_of(batch)
        looks = bool(samples) and self._looks_left > 0
        self._tell(BatchEntered(batch=batch, call=call, is_first=is_first, is_looked_at=looks))
        if not samples:
            return
        self._looks_left -= looks
        place, step = self._places.next(), self._training.step
        if self._deferred or set(map(type, samples)) != {bytes}:
            self._deferred.append((samples, place, step))
            if len(self._deferred) >= NUM_DEFERRED:
                self.settle()
        else:
            self._see(digest_of(samples), place, step)

    @contextlib.contextmanager
    def unheard(self) -> Iterator[None]:
        """Within it the guard itself calls the model."""
        self.is_deaf = True
        try:
            yield
        finally:
            self.is_deaf = False

    def part_enters(self, batch: Any) -> None:
        """A part of a container is called with what no other part made."""
        self._tell(BatchEntered(batch=batch, kind=Inputs.PART))

    def passes(self, training: bool) -> None:
        """A forward pass that is no batch of the training; in training mode it moves running statistics."""
        is_first = not self._begun and not self._gave_up
        self._tell(BatchEntered(kind=Inputs.PASS, is_training=training, is_first=is_first))

    def after_save(self) -> None:
        """A checkpoint was saved: look again."""
        self._looks_left = NUM_LOOKS

    def restart(self) -> None:
        """The next batch is the first one again."""
        self._begun, self._places = False, Places()
        self._looks_left = NUM_LOOKS

    def settle(self) -> None:
        """Read the samples that wait on a device."""
        deferred, self._deferred = self._deferred, []
        for samples, place, step in deferred:
            self._see(digest_of(samples), place, step)

    def _unhook(self) -> None:
        if self._handle is not None:
            self._handle.remove()

    def _before_compiled(self, model: Any, args: Any, kwargs: Any) -> None:
        """The compiled model is called: a hook inside it would see nothing, so there is none from now on."""
        self._unhook()
        _before_model(model, args, kwargs)


# The witness is kept outside the module, and a pickle does not keep the hook: a guarded model can still be deep-copied and
# saved whole, and a copy is not observed.
_watched: "weakref.WeakKeyDictionary[Any, BatchWitness]" = weakref.WeakKeyDictionary()


def _before_model(module: Any, args: Any, kwargs: Any) -> None:
    witness = _watched.get(module)
    if witness is None or witness.is_deaf:
        return
    if module.training and sys.modules["torch"].is_grad_enabled():
        witness.take((args, kwargs), (module, args, kwargs))
    else:
        witness.passes(bool(module.training))


def _before_part(module: Any, args: Any, kwargs: Any) -> None:
    witness = _watched.get(module)
    if witness is None or witness.is_deaf or not module.training or not sys.modules["torch"].is_grad_enabled():
        return
    tensors = tensors_of((args, kwargs))
    if tensors and not any(tensor.requires_grad for tensor in tensors):
        witness.part_enters((args, kwargs))


def _failed(problem: Exception) -> None:
    for witness in set(_watched.values()):
        witness.failed(problem)


@functools.cache
def _hook(work: Callable[..., None]) -> ModelHook:
    return ModelHook(work, _failed)


# ---- what is in a batch ----------------------------------------------------------------------------------------------


def samples_of(batch: Any) -> list[Any]:
    """A sample of all that is in a batch, with its shapes, for `digest_of`: bytes, and small copies of what is on a device."""
    found: list[Any] = []
    for thing in islice(leaves_in(batch), NUM_TENSORS):
        if isinstance(thing, str):
            found.append(thing.encode())
        elif isinstance(thing, bytes):
            found.append(thing)
        elif not hasattr(thing, "detach"):
            found.append(array_bytes(thing))
        else:
            found.append(f"{tuple(thing.shape)}{thing.dtype}".encode())
            part = part_of(thing, SAMPLES)
            if part is not None:
                found.append(raw_bytes(part) if part.is_cpu else _OnDevice(part.clone()))
    return found


@dataclass(slots=True)
class _OnDevice:
    """A small copy on a device, which is read later."""

    sample: Any

    def bytes(self) -> bytes:
        """Its values; waits for the device."""
        return raw_bytes(self.sample.cpu())


def is_call(batch: Any) -> bool:
    """Whether this is what a hook hands over: the positional and the named inputs of a call."""
    return isinstance(batch, tuple) and len(batch) == 2 and isinstance(batch[0], tuple) and isinstance(batch[1], dict)


def tensors_of(batch: Any) -> list[Any]:
    """Every tensor in a batch, at any depth, in a form that can be read."""
    return [thing for thing in leaves_in(batch) if hasattr(thing, "untyped_storage")]


def leaves_in(thing: Any, depth: int = 0) -> Iterator[Any]:
    """Dense tensors, arrays and texts inside a batch of any form, in a fixed order."""
    if isinstance(thing, str | bytes):
        yield thing
    elif hasattr(thing, "untyped_storage") and hasattr(thing, "layout"):
        yield from _dense_parts(thing)
    elif hasattr(thing, "__array__") and hasattr(thing, "dtype") and hasattr(thing, "shape"):
        yield thing
    elif depth >= DEPTH:
        return
    elif isinstance(thing, Mapping):  # a TensorDict, too: it has a dtype and a shape, and iterates over its rows
        for key in sorted(thing.keys(), key=str):
            yield from leaves_in(thing[key], depth + 1)
    elif isinstance(thing, tuple | list):
        for item in thing:
            yield from leaves_in(item, depth + 1)
    elif type(thing).__module__ != "builtins" and hasattr(thing, "__dict__") and not hasattr(thing, "parameters"):
        yield from leaves_in(vars(thing), depth + 1)  # a dataclass, a graph; no module


def _dense_parts(tensor: Any) -> Iterator[Any]:
    """The tensor itself, or the dense ones that a sparse, nested or quantized one consists of.

    Of one that `torch.func` has wrapped what stands behind it: under `vmap` all of its rows.
    """
    torch = sys.modules["torch"]
    inside = torch._C._functorch
    while inside.is_functorch_wrapped_tensor(tensor):
        tensor = inside.get_unwrapped(tensor)
    if tensor.is_nested:
        yield tensor.values()
        yield tensor.offsets() if tensor.layout is torch.jagged else tensor._nested_tensor_size()
    elif tensor.layout is not torch.strided:
        parts = LAYOUTS.get(str(tensor.layout))
        yield from [getattr(tensor, part)() for part in parts] if parts else [tensor.to_dense()]
    elif tensor.is_meta:
        yield f"meta {tuple(tensor.shape)} {tensor.dtype}"
    else:
        yield tensor.int_repr() if tensor.is_quantized else tensor


LAYOUTS = {
    "torch.sparse_coo": ("_indices", "_values"),
    **dict.fromkeys(("torch.sparse_csr", "torch.sparse_bsr"), ("crow_indices", "col_indices", "values")),
    **dict.fromkeys(("torch.sparse_csc", "torch.sparse_bsc"), ("ccol_indices", "row_indices", "values")),
}


# ---- where the loader stands -----------------------------------------------------------------------------------------


class Places:
    """The place of each batch in the pass (epoch) of its loader, counted as batches enter the model."""

    def __init__(self) -> None:
        self._data = self._pass = self._place = 0
        self._stranger = 0

    def next(self) -> int:
        """The place of the batch that enters now, from 1; 0 when no `DataLoader` was read so far."""
        data, number = _Read.latest
        if not number:
            return 0
        if self._data and data != self._data and data != self._stranger:
            self._stranger = data  # an evaluation in between: its loader was read last, and this batch was read before
        elif (data, number) != (self._data, self._pass):
            self._data, self._pass, self._place, self._stranger = data, number, 0, 0
        self._place += 1
        return self._place


class _Read:
    """The last batch that any `DataLoader` of this process yielded: which data set, and which pass of which loader."""

    latest = (0, 0)
    passes = 0
    yielded: deque[list[Any]] | None = None  # tensors of the last batches, where somebody asked for them


def keep_yielded() -> None:
    """From now on the last batches that loaders yield are kept."""
    if _Read.yielded is None:
        _Read.yielded = deque(maxlen=NUM_YIELDED)


def _keep(batch: Any) -> None:
    if _Read.yielded is not None:  # no reference to a device: a batch there is as large as it allows
        _Read.yielded.append([tensor if tensor.is_cpu else weakref.ref(tensor) for tensor in tensors_of(batch)])


def yielded_lately() -> list[list[Any]]:
    """Tensors of the last batches that loaders of this process yielded, oldest first; a prepared loader reads one ahead."""
    found = []
    for batch in _Read.yielded or ():
        tensors = [one() if isinstance(one, weakref.ref) else one for one in batch]
        if all(tensor is not None for tensor in tensors):
            found.append(tensors)
    return found


def watch_loaders() -> None:
    """Note the pass of every loader when it yields a batch (`patches.py`)."""
    change("loaders", _noting)
    change("prepared loaders", _handing)


def _handing(original: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
    def __iter__(self: Any) -> Iterator[Any]:
        for batch in original(self):
            with contextlib.suppress(Exception):  # a batch of another kind: what it holds is not known
                _keep(batch)
            yield batch

    return __iter__


def _noting(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def __next__(self: Any) -> Any:
        batch = original(self)
        try:
            number = self.__dict__.get("_chronicle_pass")
            if number is None or self._num_yielded == 1:
                _Read.passes = number = _Read.passes + 1
                self._chronicle_pass = number
            _Read.latest = (id(self._dataset), number)
            _keep(batch)
        except Exception:  # noqa: BLE001 a loader of another kind: its passes are not known
            _Read.latest = (0, 0)
        return batch

    return __next__

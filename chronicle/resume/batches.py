"""Observes the batches that enter the model: a digest of each, and where its loader stands.

A batch is what a forward pass in training mode with gradients gets: an evaluation, a generation and the first run of a
checkpointed block are none. A hook on the model sees it, or the call of its compiled form (`compiled.py`), or an adapter hands
it over (Lightning). The digest is 64 bits of a strided sample of each tensor. Samples of a batch on a device are read later,
many at once, so that no step waits for the device.
"""

import functools
import hashlib
import math
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from chronicle.resume.compiled import ModelHook, compiled_part, see_compiled_calls
from chronicle.resume.faults import shield
from chronicle.resume.feed import Shapes

SAMPLES = 64  # elements per tensor
NUM_SHAPES = 3
NUM_TENSORS = 16  # of one batch
NUM_YIELDED = 3
NUM_DEFERRED = 256  # batches on a device whose samples wait to be read
DEPTH = 6


class BatchWitness:
    """Tells `see(digest, place, step)` of every batch of the training, `step` being the value of `step()` at that moment.

    `first()` is called before the first batch of a launch.
    """

    def __init__(
        self,
        see: Callable[[int, int, int | None], None],
        step: Callable[[], int | None],
        first: Callable[[], None],
        contained: Callable[[str], AbstractContextManager[Any]],
    ) -> None:
        self._see, self._step, self._first, self._contained = see, step, first, contained
        self._model: weakref.ref[Any] | None = None
        self._handle: Any = None
        self._handle_after: Any = None
        self._begun = False
        self._deferred: list[tuple[list[Any], int, int | None]] = []
        self._places = Places()
        self.lost: Callable[[Exception], None] = lambda problem: None  # told of an error of the guard itself
        self._gave_up = False
        self.enters: Callable[[Any], None] = lambda batch: None  # before every batch
        self.leaves: Callable[[Any], None] = lambda output: None  # what the model gives for it
        self.enters_part: Callable[[Any], None] = lambda batch: None  # what no other part made enters a part of a container
        self.works: Callable[[], None] = lambda: None  # before every forward pass, an evaluation's too
        self.calibrates: Callable[[bool], None] = lambda training: None  # one without gradients comes before every batch
        self.shapes: Shapes | None = None  # told of the first batches of the launch, and of the first after a save
        self._shapes_left = NUM_SHAPES
        self.look: Callable[[Any, Any], None] = lambda args, kwargs: None  # at the first inputs of this launch
        self._looks_left = NUM_SHAPES

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
        with self._contained("batches"):
            if self._model is not None:
                return
            model = compiled_part(model)
            self._model = weakref.ref(model)
            _witnesses[model] = self
            watch_loaders()
            see_compiled_calls(model, shield(self._before_compiled, self.failed), shield(self._after_compiled, _outputs_failed))
            self._handle = model.register_forward_pre_hook(_forward_hook(), with_kwargs=True)
            self._handle_after = model.register_forward_hook(_output_hook())
            if type(model).forward is sys.modules["torch"].nn.Module.forward:  # a `ModuleDict`: only its parts are called
                for part in model.children():
                    _witnesses_of_parts[part] = self
                    part.register_forward_pre_hook(_part_hook(), with_kwargs=True)
                    part.register_forward_hook(_part_output_hook())

    def watch_outputs(self, models: Sequence[Any]) -> None:
        """Look at what these other models give, too: the loss of a generator goes through its critic."""
        with self._contained("outputs"):
            for model in map(compiled_part, models):
                if model not in _witnesses and model not in _witnesses_of_outputs:
                    _witnesses_of_outputs[model] = self
                    model.register_forward_hook(_output_hook())

    def failed(self, problem: Exception) -> None:
        """Looking at a batch failed: no more batches are looked at, because the count of batches would be wrong."""
        self._gave_up = True
        self._unhook()
        self.lost(problem)

    def take(self, batch: Any) -> None:
        """A batch of the training, in any form."""
        self.works()
        if self._gave_up:
            return
        self.enters(batch)
        if not self._begun:
            self._begun = True
            self._first()
        samples = list(_samples(batch))
        if not samples:
            return
        if self._shapes_left and self.shapes is not None:
            self._shapes_left -= 1
            self.shapes.see(batch)
        if self._looks_left:
            self._looks_left -= 1
            self.look(*batch) if is_call(batch) else self.look((batch,), {})
        place, step = self._places.next(), self._step()
        if self._deferred or any(not isinstance(sample, bytes) for sample in samples):
            self._deferred.append((samples, place, step))
            if len(self._deferred) >= NUM_DEFERRED:
                self.settle()
        else:
            self._see(_digest(samples), place, step)

    def passes(self, training: bool) -> None:
        """A forward pass that is no batch of the training; in training mode it moves running statistics."""
        self.works()
        if not self._begun and not self._gave_up:
            self.calibrates(training)

    def after_save(self) -> None:
        """A checkpoint was saved: look at the shapes again."""
        self._shapes_left = NUM_SHAPES

    def restart(self) -> None:
        """The next batch is the first one again."""
        self._begun, self._places = False, Places()
        self._shapes_left = self._looks_left = NUM_SHAPES

    def settle(self) -> None:
        """Read the samples that wait on a device."""
        deferred, self._deferred = self._deferred, []
        for samples, place, step in deferred:
            self._see(_digest(samples), place, step)

    def _unhook(self) -> None:
        for handle in (self._handle, self._handle_after):
            if handle is not None:
                handle.remove()
        self._handle = self._handle_after = None

    def _before_compiled(self, args: Any, kwargs: Any) -> None:
        """The compiled model is called: a hook inside it would see nothing, so there is none from now on."""
        self._unhook()
        model = self._model() if self._model is not None else None
        if model is not None:
            _before_forward(model, args, kwargs)

    def _after_compiled(self, output: Any) -> None:
        model = self._model() if self._model is not None else None
        if model is not None:
            _after_forward(model, (), output)


# The witness is kept outside the module, and a pickle does not keep the hook: a guarded model can still be deep-copied and
# saved whole, and a copy is not observed.
_witnesses: "weakref.WeakKeyDictionary[Any, BatchWitness]" = weakref.WeakKeyDictionary()


_witnesses_of_parts: "weakref.WeakKeyDictionary[Any, BatchWitness]" = weakref.WeakKeyDictionary()


def _before_part(module: Any, args: Any, kwargs: Any) -> None:
    witness = _witnesses_of_parts.get(module)
    if witness is None or not module.training or not sys.modules["torch"].is_grad_enabled():
        return
    tensors = tensors_of((args, kwargs))
    if tensors and not any(tensor.requires_grad for tensor in tensors):
        witness.enters_part((args, kwargs))


def _after_part(module: Any, args: Any, output: Any) -> None:
    witness = _witnesses_of_parts.get(module)
    if witness is not None and module.training and sys.modules["torch"].is_grad_enabled():
        witness.leaves(output)


def _part_output_hook() -> ModelHook:
    if not _made_for_part_outputs:
        _made_for_part_outputs.append(ModelHook(shield(_after_part, _outputs_failed)))
    return _made_for_part_outputs[0]


_made_for_part_outputs: list[ModelHook] = []


def _part_hook() -> ModelHook:
    if not _made_for_parts:
        _made_for_parts.append(ModelHook(shield(_before_part, _failed)))
    return _made_for_parts[0]


_made_for_parts: list[ModelHook] = []


def _before_forward(module: Any, args: Any, kwargs: Any) -> None:
    witness = _witnesses.get(module)
    if witness is None:
        return
    if module.training and sys.modules["torch"].is_grad_enabled():
        witness.take((args, kwargs))
    else:
        witness.passes(bool(module.training))


_witnesses_of_outputs: "weakref.WeakKeyDictionary[Any, BatchWitness]" = weakref.WeakKeyDictionary()


def _after_forward(module: Any, args: Any, output: Any) -> None:
    witness = _witnesses.get(module) or _witnesses_of_outputs.get(module)
    if witness is not None and module.training and sys.modules["torch"].is_grad_enabled():
        witness.leaves(output)


def _output_hook() -> ModelHook:
    if not _made_for_outputs:
        _made_for_outputs.append(ModelHook(shield(_after_forward, _outputs_failed)))
    return _made_for_outputs[0]


def _outputs_failed(problem: Exception) -> None:
    """Batches go on to be looked at: only what the model gives is not."""
    for witness in tuple(_witnesses.values()):
        witness.leaves = lambda output: None
        witness.lost(problem)


_made_for_outputs: list[ModelHook] = []


def _failed(problem: Exception) -> None:
    for witness in tuple(_witnesses.values()):
        witness.failed(problem)


def _forward_hook() -> ModelHook:
    if not _made:
        _made.append(ModelHook(shield(_before_forward, _failed)))
    return _made[0]


_made: list[ModelHook] = []


# ---- digest of a batch -----------------------------------------------------------------------------------------------


def batch_digest(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The digest of a model's inputs in hex: a strided sample of all tensors, with their shapes."""
    return f"{_digest(list(_samples((args, kwargs)))):016x}"


def is_call(batch: Any) -> bool:
    """Whether this is what a hook hands over: the positional and the named inputs of a call."""
    return isinstance(batch, tuple) and len(batch) == 2 and isinstance(batch[0], tuple) and isinstance(batch[1], dict)


def sample_batch(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Shape and strided sample of every tensor, still on its device: no transfer."""
    samples = []
    for thing in _leaves((args, dict(kwargs)), 0):
        if hasattr(thing, "detach"):
            flat = thing.detach().reshape(-1)
            stride = _head(thing.shape, thing.dtype)[1]
            samples.append((f"{tuple(thing.shape)}{thing.dtype}", flat[::stride][:SAMPLES]))
    return samples


def digest_of(samples: Sequence[tuple[str, Any]]) -> str:
    """Hash of what `sample_batch` returned."""
    digest = hashlib.sha256()
    for shape, sample in samples:
        digest.update(shape.encode())
        digest.update(repr(sample.tolist()).encode())
    return digest.hexdigest()[:16]


def _digest(samples: Sequence[Any]) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for sample in samples:
        digest.update(sample if isinstance(sample, bytes) else _bytes(sample.cpu()))
    return int.from_bytes(digest.digest(), "little")


def _samples(batch: Any) -> Iterator[Any]:
    """Bytes, and small copies of what lies on a device, in a fixed order."""
    for count, thing in enumerate(_leaves(batch, 0)):
        if count >= NUM_TENSORS:
            return
        if isinstance(thing, str | bytes):
            yield thing.encode() if isinstance(thing, str) else thing
            continue
        if not hasattr(thing, "detach"):
            try:
                thing = sys.modules["torch"].as_tensor(thing)  # numpy
            except (TypeError, ValueError):  # texts, dates, objects, another order of bytes
                yield _array_bytes(thing)
                continue
        head, stride = _head(thing.shape, thing.dtype)
        yield head
        thing = thing.detach()
        if thing.is_cpu and thing.is_contiguous() and not (_is_strange(thing.dtype) or thing.is_conj() or thing.is_neg()):
            yield thing.numpy().reshape(-1)[::stride][:SAMPLES].tobytes()  # several times as fast as torch's own
            continue
        sample = thing.reshape(-1)[::stride][:SAMPLES]
        yield _bytes(sample) if thing.is_cpu else sample.clone()


@functools.lru_cache(maxsize=64)
def _is_strange(dtype: Any) -> bool:
    """Whether numpy has no such numbers: bfloat16, float8."""
    try:
        sys.modules["torch"].empty(0, dtype=dtype).numpy()
    except TypeError:
        return True
    return False


def _array_bytes(thing: Any) -> bytes:
    """A sample of an array that torch does not take. What an object is called may be an address, so its class stands for it."""
    array = sys.modules["numpy"].asarray(thing)
    flat = array.reshape(-1)[:: max(1, array.size // SAMPLES)][:SAMPLES]
    head = f"{array.shape}{array.dtype}".encode()
    if array.dtype.hasobject:
        plain = (str, bytes, int, float)
        return head + repr([item if isinstance(item, plain) else type(item).__name__ for item in flat.tolist()]).encode()
    return head + bytes((flat.astype("f8") if array.dtype.kind == "f" else flat).tobytes())


def _bytes(sample: Any) -> bytes:
    torch = sys.modules["torch"]
    sample = sample.resolve_conj().resolve_neg()
    try:
        return bytes(sample.numpy().tobytes())
    except TypeError:  # numpy has no bfloat16
        return bytes(sample.contiguous().view(torch.uint8).numpy().tobytes())


@functools.lru_cache(maxsize=1024)
def _head(shape: tuple[int, ...], dtype: Any) -> tuple[bytes, int]:
    """Shape and type as bytes, and the distance of the samples.

    The distance has no common factor with the rows: else only one column would be seen (`[CLS]`).
    """
    stride, last = max(1, math.prod(shape) // SAMPLES), shape[-1] if shape else 1
    while stride > 1 and math.gcd(stride, last) != 1:
        stride -= 1
    return f"{tuple(shape)}{dtype}".encode(), stride


def leaves_in(thing: Any) -> Iterator[Any]:
    """Tensors, arrays and texts inside a batch of any form, in a fixed order."""
    return _leaves(thing, 0)


def _leaves(thing: Any, depth: int) -> Iterator[Any]:
    """Dense tensors, arrays and texts inside a batch of any form."""
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
            yield from _leaves(thing[key], depth + 1)
    elif isinstance(thing, tuple | list):
        for item in thing:
            yield from _leaves(item, depth + 1)
    elif type(thing).__module__ != "builtins" and hasattr(thing, "__dict__") and not hasattr(thing, "parameters"):
        yield from _leaves(vars(thing), depth + 1)  # a dataclass, a graph; no module


def readable(tensor: Any) -> Any:
    """What stands behind a tensor that `torch.func` has wrapped: under `vmap` all of its rows; any other tensor itself."""
    inside = sys.modules["torch"]._C._functorch
    while inside.is_functorch_wrapped_tensor(tensor):
        tensor = inside.get_unwrapped(tensor)
    return tensor


def _dense_parts(tensor: Any) -> Iterator[Any]:
    """The tensor itself, or the dense ones that a sparse, nested or quantized one consists of."""
    torch = sys.modules["torch"]
    tensor = readable(tensor)
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
    yielded: deque[list[Any]] | None = None  # the tensors of the last batches, where somebody asked for them
    handed: tuple[weakref.ref[Any], ...] = ()  # those of the last batch of a prepared loader, where it had copied them


def keep_yielded() -> None:
    """From now on the last batches that loaders yield are kept."""
    if _Read.yielded is None:
        _Read.yielded = deque(maxlen=NUM_YIELDED)


def yielded_lately() -> list[list[Any]]:
    """Tensors of the last batches that loaders of this process yielded, oldest first; a prepared loader reads one ahead.

    The last is what a prepared loader of Accelerate handed over, on its device, if all of it is still there.
    """
    handed = [ref() for ref in _Read.handed]
    return [*(_Read.yielded or ()), *([handed] if handed and all(tensor is not None for tensor in handed) else [])]


def watch_loaders() -> None:
    """Note the pass of every loader when it yields a batch. Wraps one method of a class of loaders, once per process."""
    accelerate = sys.modules.get("accelerate.data_loader")
    for name in ("DataLoaderShard", "DataLoaderDispatcher"):
        prepared = getattr(accelerate, name, None)
        iterate = None if prepared is None else prepared.__dict__.get("__iter__")
        if prepared is not None and iterate is not None and not hasattr(iterate, "_chronicle"):
            prepared.__iter__ = _handing(iterate)
    dataloader = sys.modules.get("torch.utils.data.dataloader")
    stateful = sys.modules.get("torchdata.stateful_dataloader.stateful_dataloader")
    for module, name in ((dataloader, "_BaseDataLoaderIter"), (stateful, "_StatefulBaseDataLoaderIter")):
        kind = getattr(module, name, None)
        original = None if kind is None else kind.__dict__.get("__next__")
        if kind is not None and original is not None and not hasattr(original, "_chronicle"):
            kind.__next__ = _noting(original)


def tensors_of(batch: Any) -> list[Any]:
    """Every tensor in a batch, at any depth, in a form that can be read."""
    return [thing for thing in leaves_in(batch) if hasattr(thing, "untyped_storage")]


def _handing(original: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
    @functools.wraps(original)
    def __iter__(self: Any) -> Iterator[Any]:
        for batch in original(self):
            if _Read.yielded is not None:
                try:  # no reference: a batch on a device is as large as the device allows
                    _Read.handed = tuple(weakref.ref(tensor) for tensor in tensors_of(batch))
                except Exception:  # noqa: BLE001 a batch of another kind: what it holds is not known
                    _Read.handed = ()
            yield batch

    __iter__._chronicle = True  # type: ignore[attr-defined]
    return __iter__


def _noting(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def __next__(self: Any) -> Any:
        batch = original(self)
        try:
            number = self.__dict__.get("_chronicle_pass")
            if number is None or self._num_yielded == 1:
                _Read.passes = number = _Read.passes + 1
                self._chronicle_pass = number
            _Read.latest = (id(self._dataset), number)
            if _Read.yielded is not None:
                _Read.yielded.append(tensors_of(batch))
        except Exception:  # noqa: BLE001 a loader of another kind: its passes are not known
            _Read.latest = (0, 0)
        return batch

    __next__._chronicle = True  # type: ignore[attr-defined]
    return __next__

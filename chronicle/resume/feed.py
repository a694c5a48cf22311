"""What a training reads: the dataset, the order in which it is drawn, and the shape of the batches.

`feed_facts` describes the loader of a launch without reading a sample: the class of the dataset, its length, the columns
of a Hugging Face dataset, plain attributes (`block_size`), a digest of tensors and arrays it holds, the sampler with its
seed. Nothing is indexed and no iterator is made, because a dataset may augment at random or read the network. What cannot be
seen (files that it will open) is left out: the batches show it.

The row of a fact says what a difference means: `dataset` another dataset, `shuffle` another order, `ROWS_OF_DATASET` other rows
(generated data and random splits differ like that too). Seeds, times, and attributes that the constructor does not take are
left out.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from chronicle.resume.batches import tensors_of
from chronicle.resume.configuration import SKIPPED, Fact, constructor_arguments, plain_value, quietly
from chronicle.resume.samples import digest, is_array, plain_bytes

ROWS_OF_DATASET = "rows of the dataset"
NUM_PARTS = 16  # of a data set that is put together
NUM_ROWS = 8  # of a Hugging Face dataset
NUM_SAMPLES = 64  # elements of a tensor, items of a list
CHANGING = {"epoch", "seed", "rank", "world_size", "num_replicas", "generator", "start", "skip"}
DERIVED = {"format", "info", "builder_name", "cache_files", "citation", "description", "rng", "generator", "lock", "worker_id"}
WRAPS = ("dataset", "datasets", "data_source", "source", "hf_dataset", "ds")  # where a dataset keeps the one that it wraps


def feed_facts(loader: Any) -> Iterator[Fact]:
    """Dataset and order of the loader that is trained from; none when it is not known."""
    if loader is None:
        return
    dataset = quietly(lambda: getattr(loader, "dataset", None))
    if dataset is not None:
        yield from dataset_facts(dataset)
    shuffle = is_shuffled(loader)
    if shuffle is not None:
        yield "shuffle", "order.shuffle", shuffle


# ---- the dataset -----------------------------------------------------------------------------------------------------


def dataset_facts(dataset: Any, name: str = "dataset", depth: int = 0) -> Iterator[Fact]:
    """Values of one dataset and of those it wraps."""
    yield "dataset", f"{name}.class", type(dataset).__name__
    length = quietly(lambda: len(dataset))  # an iterable dataset has none; some raise errors of their own
    if length is not None:
        yield "dataset", f"{name}.length", length
    if type(dataset).__module__.startswith("datasets."):
        yield from _of_hugging_face(dataset, name)
    elif isinstance(dataset, (list, tuple)):
        yield ROWS_OF_DATASET, f"{name}.rows", _rows_digest(dataset)
    else:
        yield from _of_attributes(dataset, name, depth)


def _of_hugging_face(dataset: Any, name: str) -> Iterator[Fact]:
    """Not its fingerprint: that is another one in every launch."""
    columns = getattr(dataset, "column_names", None)
    if isinstance(columns, list):
        yield "dataset", f"{name}.columns", sorted(map(str, columns))
    if content := _arrow_digest(dataset):
        yield ROWS_OF_DATASET, f"{name}.rows", content


def _arrow_digest(dataset: Any) -> str:
    """Of a few rows as they are stored, without formats and transforms; "" for a stream.

    The fingerprint says too much: it changes with the modification time of a cache file and with a random split.
    """
    try:
        table, indices, size = dataset.data, dataset._indices, len(dataset)
        places = range(0, size, max(1, size // NUM_ROWS))[:NUM_ROWS]
        rows = [indices.column(0)[place].as_py() if indices is not None else place for place in places]
        return _rows_digest([table.fast_slice(row, 1).to_pydict() for row in rows])
    except Exception:  # noqa: BLE001 another version of the library
        return ""


def _of_attributes(dataset: Any, name: str, depth: int) -> Iterator[Fact]:
    kind: Any = type(dataset)
    certain = constructor_arguments(kind)
    for key, thing in (getattr(dataset, "__dict__", None) or {}).items():
        place = f"{name}.{key}"
        if key in WRAPS and depth < 4 and not is_array(thing) and not isinstance(thing, str):
            several = isinstance(thing, (list, tuple)) and key == "datasets"
            for index, one in enumerate(thing[:NUM_PARTS] if several else [thing]):
                yield from dataset_facts(one, f"{place}.{index}" if several else place, depth + 1)
        elif key.startswith("_") or key in DERIVED:
            continue
        elif is_array(thing):
            yield ROWS_OF_DATASET, place, _array_digest(thing)
        elif (value := plain_value(thing)) is not SKIPPED and not (isinstance(thing, (list, tuple)) and len(thing) > 8):
            if key in certain and key not in CHANGING:
                yield "dataset", place, value
        elif isinstance(thing, (list, tuple)):
            yield ROWS_OF_DATASET, place, f"{len(thing)} items, {_rows_digest(thing)}"


# ---- the order -------------------------------------------------------------------------------------------------------


def is_shuffled(loader: Any) -> bool | None:
    """Whether the order of a loader is drawn; None for a sampler of the script's own, whose order is its secret."""
    sampler = _sampler(loader)
    shuffle = getattr(sampler, "shuffle", None)
    if isinstance(shuffle, bool):
        return shuffle
    names = {kind.__name__ for kind in type(sampler).__mro__}
    if names & {"RandomSampler", "SeedableRandomSampler", "SubsetRandomSampler", "WeightedRandomSampler"}:
        return True
    return False if "SequentialSampler" in names else None


def _sampler(loader: Any) -> Any:
    """The innermost sampler: wrappers of Accelerate keep it in `batch_sampler.sampler`, or one batch sampler deeper."""
    batches = _innermost(getattr(loader, "batch_sampler", None), "batch_sampler")
    return _innermost(getattr(batches, "sampler", None) or getattr(loader, "sampler", None), "sampler")


def _innermost(thing: Any, name: str) -> Any:
    for _ in range(5):
        inner = getattr(thing, name, None)
        if inner is None or inner is thing:
            break
        thing = inner
    return thing


# ---- shapes ----------------------------------------------------------------------------------------------------------


ROWS, LENGTH = "rows of a batch", "sequence length"


class Shapes:
    """How many rows the first batches of a launch had, and those after each save; how long their sequences of tokens were."""

    def __init__(self) -> None:
        self._seen: list[tuple[int, int | None, str]] = []  # rows, length, precision
        self._at_save = 0

    def saved(self) -> None:
        """A checkpoint was saved."""
        self._at_save = len(self._seen)

    def see(self, inputs: Any) -> None:
        """One batch enters the model."""
        first = next((tensor for tensor in tensors_of(inputs) if tensor.dim() > 0), None)
        if first is not None:
            self._seen.append((int(first.shape[0]), sequence_length(inputs), _autocast(first.device.type)))

    def to_json(self, *, since_save: bool = False) -> dict[str, Any]:
        """`rows`, `length`, `autocast` as far as all had the same, and how many `batches` the launch had; {} before one."""
        seen = self._seen[self._at_save if since_save else 0 :]
        record: dict[str, Any] = {"batches": len(self._seen)} if seen else {}
        for name, values in zip(("rows", "length", "autocast"), zip(*seen, strict=True), strict=False):
            if len(set(values)) == 1 and values[0] is not None:
                record[name] = values[0]
        return record


def _autocast(device: str) -> str:
    """The precision that is set around the model: a dtype, "off", or "?" where torch cannot say."""
    import torch

    try:
        on = torch.is_autocast_enabled(device)
        return str(torch.get_autocast_dtype(device)).removeprefix("torch.") if on else "off"
    except (RuntimeError, TypeError):
        return "?"


def sequence_length(inputs: Any) -> int | None:
    """The length of the rows of tokens among these inputs.

    None where it may differ from batch to batch: rows that are padded (a mask with zeros, or rows that end in one repeated
    token), single rows, and anything but whole numbers.
    """
    import torch

    tokens = [t for t in tensors_of(inputs) if t.dim() == 2 and t.dtype in (torch.int32, torch.int64) and t.shape[0] > 1]
    sizes = {int(t.shape[1]) for t in tokens}
    if len(sizes) != 1 or (length := sizes.pop()) < 4:
        return None
    first = tokens[0].detach()
    for mask in (t for t in tokens[1:] if bool((t.detach() <= 1).all())):
        if not bool(mask.detach().all()):
            return None
    tail = first[:, -2:]
    return None if bool((tail[:, 0] == tail[:, 1]).any()) else length


# ---- digests ---------------------------------------------------------------------------------------------------------


def _array_digest(thing: Any) -> str:
    """Shape, type and a sample of a tensor or array. A memory-mapped one is read at a few places."""
    return f"{tuple(int(n) for n in thing.shape)} {str(thing.dtype).removeprefix('torch.')} {_content(thing)}"


def _rows_digest(things: Sequence[Any]) -> str:
    """Of a plain list: some of its items, as far as they are plain values, tensors and arrays."""
    return _content(things[:: max(1, len(things) // NUM_SAMPLES)][:NUM_SAMPLES])


def _content(thing: Any) -> str:
    """Digest of its values; "unread" where there is an array of a library that we do not know."""
    try:
        return digest(plain_bytes(thing, NUM_SAMPLES))
    except (AttributeError, TypeError, ValueError):
        return "unread"

"""Batches by step: the texts and their windows, the samples that the data plan names, expanded to bits.

Item t of the dataset is this rank's part of the global batch of step t, so workers are stateless and a resume can start at
any step. Loaders are not given to `accelerator.prepare`, which would re-shard and re-order them. `chronicle.data.corpora` lists
the names of texts in memory; `chronicle.data.shards` reads sources that were built on disk.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from bit_transformer.data.bits import compress_window, compressed_rows, encode_bytes
from bit_transformer.errors import BadRecipe
from bit_transformer.recipes import DataConfig
from chronicle.data import DataError, DataPlan, Segments, SourceSpec, step_digest
from chronicle.data.corpora import read_text
from chronicle.data.plan import SampleIds
from chronicle.data.repeats import without_repeats
from chronicle.data.shards import (
    ShardProblem,
    ShardReader,
    read_source_manifest,
    shard_location,
    split_text,
    text_members,
)
from rollback.disk.durable import write_atomic

_STRETCH_IDS = 8192


# --- Texts in memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Training text and held-out text of one source; `digest` is the sha256 of both."""

    train: bytes
    held_out: bytes
    digest: str


@lru_cache(maxsize=4)
def read_corpus(name: str) -> Corpus:
    """Read a text without its repeats; every twentieth stretch of 16 KiB is held out. Raises BadRecipe where there is none."""
    try:
        text = _without_repeats(read_text(name))
    except DataError as problem:
        raise BadRecipe(str(problem), problem.remedy) from problem
    parts = {split: b"".join(stretches) for split, stretches in split_text(text).items()}
    return Corpus(train=parts["train"], held_out=parts["held_out"], digest=hashlib.sha256(text).hexdigest())


_CACHED = "v1"  # changes with what `without_repeats` leaves


def _without_repeats(text: bytes) -> bytes:
    """The text without its repeats, from the user's cache: looking for them takes a second for 1 MB."""
    base = os.environ.get("XDG_CACHE_HOME") or Path(os.environ.get("HOME") or "/nonexistent") / ".cache"
    path = Path(base) / "chronicle" / "texts" / f"{hashlib.sha256(text).hexdigest()}-{_CACHED}"
    with suppress(OSError):
        digest, _, kept = path.read_bytes().partition(b"\n")
        if digest == hashlib.sha256(kept).hexdigest().encode():
            return kept
    kept = without_repeats(text)
    if os.environ.get("CHRONICLE_CACHE") != "off":
        with suppress(OSError):  # a cache that cannot be written is no cache
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, hashlib.sha256(kept).hexdigest().encode() + b"\n" + kept, durable=False)
    return kept


# --- Windows


class TextWindows:
    """Consecutive windows of a text in memory; an incomplete last window is dropped."""

    def __init__(self, name: str, text: bytes, digest: str, window_bytes: int) -> None:
        self.name = name
        self.digest = f"{digest}:{window_bytes}"
        usable = len(text) // window_bytes * window_bytes
        if not usable:
            raise BadRecipe(f"source `{name}` has {len(text)} bytes, fewer than one window of {window_bytes}")
        self._windows = np.frombuffer(text, dtype=np.uint8)[:usable].reshape(-1, window_bytes)
        self.num_samples = len(self._windows)

    def read(self, index: int) -> NDArray[np.uint8]:
        """Return window `index`."""
        window: NDArray[np.uint8] = self._windows[index]
        return window


class ShardWindows:
    """Windows inside the members of built tar shards; reading a window is one `pread`.

    Raises ShardProblem or DataError at once where a shard is missing, truncated or differs from the manifest.
    """

    def __init__(self, location: str, window_bytes: int, *, split: str = "train") -> None:
        manifest = read_source_manifest(location)
        self.name = manifest.source
        self.digest = f"{manifest.digest}:{split}:{window_bytes}"
        self._readers: list[ShardReader] = []
        rows: list[tuple[int, int, int]] = []
        for number, shard in enumerate(manifest.of_split(split)):
            path = shard_location(location, shard.name)
            self._readers.append(ShardReader(path))
            places = text_members(path)
            if len(places) != shard.num_samples:
                raise ShardProblem(f"shard `{path}` holds {len(places)} samples, the manifest says {shard.num_samples}",
                                   "`chronicle data verify` lists all of them")
            rows += [(number, first, size) for first, size in places]
        members = np.array(rows, dtype=np.int64).reshape(-1, 3)
        self._windows_before = np.concatenate([[0], np.cumsum(members[:, 2] // window_bytes)])
        self._members, self._window_bytes = members, window_bytes
        self.num_samples = int(self._windows_before[-1])
        if not self.num_samples:
            raise DataError(f"source `{location}` has no window of {window_bytes} bytes in its {split} shards",
                            "build it from more text, or choose a smaller window")

    def read(self, index: int) -> NDArray[np.uint8]:
        """Return window `index`."""
        member = int(np.searchsorted(self._windows_before, index, "right")) - 1
        shard, offset, _ = self._members[member]
        start = int(offset) + (index - int(self._windows_before[member])) * self._window_bytes
        return np.frombuffer(self._readers[int(shard)].read(start, self._window_bytes), dtype=np.uint8)


SampleStore: TypeAlias = TextWindows | ShardWindows  # windows of whole bytes, by number


def open_store(name: str, window_bytes: int, *, split: str, data_dir: str | None) -> SampleStore:
    """Return the windows of a source, `train` or `held_out`: built shards below `data_dir`, or text in memory (None)."""
    if data_dir is not None:
        return ShardWindows(f"{data_dir.rstrip('/')}/{name}", window_bytes, split=split)
    corpus = read_corpus(name)
    return TextWindows(name, getattr(corpus, split), corpus.digest, window_bytes)


def open_held_out(sources: Iterable[str], window_bytes: int, num_windows: int, *,
                  data_dir: str | None) -> dict[str, Tensor]:
    """Return evenly spaced held-out windows of each source as bytes (num_windows, window_bytes), uint8."""
    found = {}
    for name in sources:
        store = open_store(name, window_bytes, split="held_out", data_dir=data_dir)
        if store.num_samples < num_windows:
            raise BadRecipe(f"source `{name}` holds out {store.num_samples} windows of {window_bytes} bytes, "
                            f"eval_windows asks for {num_windows}")
        found[name] = spread_windows(store, num_windows)
    return found


def spread_windows(store: SampleStore, num_windows: int) -> Tensor:
    """Return at most `num_windows` evenly spaced windows as bytes, uint8."""
    chosen = np.linspace(0, store.num_samples - 1, min(num_windows, store.num_samples)).astype(int)
    return torch.from_numpy(np.stack([store.read(int(index)) for index in chosen]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One rank's part of the batch of one optimizer step.

    `bits_BT` are the bits, of which the first `num_bits_B` of a row are not padding; `sources_B` is the source of each
    row; `digest` is over the sample ids of the global batch.
    """

    step: int
    bits_BT: Tensor
    sources_B: Tensor
    num_bits_B: Tensor
    digest: str

    def split(self, num_parts: int) -> Iterator[Batch]:
        """Yield equal consecutive parts, for gradient accumulation."""
        for bits, sources, num_bits in zip(self.bits_BT.chunk(num_parts), self.sources_B.chunk(num_parts),
                                           self.num_bits_B.chunk(num_parts), strict=True):
            yield replace(self, bits_BT=bits, sources_B=sources, num_bits_B=num_bits)

    def to(self, device: torch.device) -> Batch:
        """Return the batch on `device`."""
        return replace(self, bits_BT=self.bits_BT.to(device), sources_B=self.sources_B.to(device),
                       num_bits_B=self.num_bits_B.to(device))

    def without_padding(self, losses_BT: Tensor) -> Tensor:
        """Return the losses (B, T − 1) of predicted symbols with the losses of padding set to 0."""
        target_T = torch.arange(1, losses_BT.shape[1] + 1, device=losses_BT.device)
        return torch.where(target_T < self.num_bits_B[:, None], losses_BT, 0.0)

    def num_predicted_B(self) -> Tensor:
        """Return the number of predicted symbols of each row: all but the first."""
        return self.num_bits_B - 1


@dataclass
class StepDataset(Dataset[Batch]):
    """`dataset[step]` is this rank's batch of that step, a function of plan and segments alone.

    The ids of many steps are computed at once, at a twentieth of the cost of one by one; the last block is cached.
    """

    plan: DataPlan
    segments: Segments
    stores: tuple[SampleStore, ...]
    config: DataConfig
    rank: int
    world_size: int
    as_bytes: bool
    _stretch: tuple[int, SampleIds] | None = None

    def _ids(self, step: int) -> SampleIds:
        count = max(1, _STRETCH_IDS // self.plan.batch_size)
        first = step // count * count
        if self._stretch is None or self._stretch[0] != first:
            self._stretch = first, self.plan.block_ids(first, count, self.segments)
        ids: SampleIds = self._stretch[1][step - first]
        return ids

    def __getitem__(self, step: int) -> Batch:
        ids = self._ids(step)
        share = len(ids) // self.world_size
        part = slice(self.rank * share, (self.rank + 1) * share)
        mine = ids[part]
        windows = torch.from_numpy(np.stack([self.stores[source].read(int(index)) for source, index in mine]))
        bits_BT = windows.long() if self.as_bytes else encode_bytes(windows)
        num_bits_B = torch.full((share,), bits_BT.shape[1])
        probability = self.config.compress_probability(step)
        if probability > 0:
            chosen = compressed_rows(seed=self.plan.seed, position=self.segments.position(step), num_rows=len(ids),
                                     probability=probability)[part]
            for row in np.flatnonzero(chosen):
                coded_T, used = compress_window(bits_BT[row])
                if used < len(coded_T) or self.config.compress_longer:
                    bits_BT[row], num_bits_B[row] = coded_T, used
        return Batch(step=step, bits_BT=bits_BT, sources_B=torch.from_numpy(mine[:, 0].copy()), num_bits_B=num_bits_B,
                     digest=step_digest(ids))


def plan_data(stores: tuple[SampleStore, ...], weights: Mapping[str, int], *, batch_size: int, seed: int) -> DataPlan:
    """Return the plan over these stores."""
    return DataPlan(seed=seed, batch_size=batch_size, sources=tuple(
        SourceSpec(name=store.name, num_samples=store.num_samples, digest=store.digest, weight=weights[store.name])
        for store in stores))


def load_steps(dataset: StepDataset, first: int, end: int, *, num_workers: int) -> Iterator[Batch]:
    """Yield the batches of steps first … end - 1; the number of workers does not change them."""
    # a loader draws a seed for its workers when it starts; from torch's global generator a restart would draw once more
    return iter(DataLoader(dataset, batch_size=None, sampler=range(first, end), num_workers=num_workers,
                           generator=torch.Generator()))

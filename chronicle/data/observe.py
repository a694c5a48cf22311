"""Count repeats and source ratios of any data loader, by observing the samples it yields.

    loader = observe(loader, key=lambda s: s["__key__"], source=lambda s: s["__url__"].split("/")[-2])
    for batch in loader:                                     # key and source may return one value, or one a sample
        …
        torch.save({…, "read": loader.state_dict()}, path)   # and loader.load_state_dict(saved["read"]) after a restart

WebDataset reshuffles at every start and does not know what was read before; Hugging Face's iterable datasets lose the
content of their shuffle buffer. `observe` passes every sample through unchanged, appends the hash of its key to
`keys-<launch>-rank-<r>.bin` and counts the samples of each source. After a restart it counts repeated samples. The state of a
checkpoint says how much its weights had read; with it, what only abandoned weights saw is told apart: it is read again, and
does not repeat. Without it both are "read before".

Told at once, on stderr and in the journal, unless `alarm` is given: a source's share in the first samples outside the band of
earlier launches (seed 003: the image-to-text dip), and a sample that another rank of this launch read as well. `chronicle data
usage` shows the counts of a run, those across ranks exactly.

The account is exact but for hashes: two keys of a billion share their 63 bits with a probability of 5 %. It is on disk every
`every` samples, so a killed process loses fewer. Memory is 8 bytes a key. Keys of earlier launches are sorted when the first
sample is counted: 0.8 s for 10⁸ keys where numpy sorts with AVX-512, some 8 s elsewhere.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from chronicle.data.shards import key_hash
from chronicle.errors import DataError
from chronicle.journal import JournalWriter
from chronicle.journal.events import DataObserved, DataRatio, JournalEvent
from chronicle.paths import RunPaths
from rollback.disk.durable import write_atomic

T = TypeVar("T")
Hashes = NDArray[np.uint64]
Span = tuple[Path, int, int]

STATE_VERSION = 1
_BAND_SDS = 4.0
_MIN_BAND = 0.02
_CHECK_EVERY = 32
_MOST_RANKS = 16  # whose keys are compared while training; `data usage` compares all


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioAlarm:
    """A source's share after a start is outside the band of earlier launches."""

    source: str
    samples: int
    share: float
    expected: float
    band: float

    def text(self) -> str:
        """Return the sentence for the journal."""
        return (f"share of `{self.source}` is {self.share:.3f} over the first {self.samples} samples of this launch: "
                f"expected {self.expected:.3f} ± {self.band:.3f}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedAlarm:
    """Two ranks of one launch read the same samples."""

    rank: int
    other: int
    shared: int
    samples: int

    def text(self) -> str:
        """Return the sentence for the journal."""
        return (f"rank {self.rank} reads what rank {self.other} reads: {self.shared} of its first {self.samples} samples are "
                "the same")


@dataclass(slots=True, kw_only=True)
class SampleCounts:
    """Counts of one launch.

    `repeats`: samples read before, by the weights this launch descends from or in it. `again`: read before by abandoned
    weights alone. `shared`: read by more than one rank; None where it was not counted. `placed`: whether a state told what
    the weights had read; else every sample of earlier launches counts as read before.
    """

    launch: int
    samples: int = 0
    repeats: int = 0
    again: int = 0
    shared: int | None = None
    placed: bool = False
    by_source: Counter[str] = field(default_factory=Counter)
    alarms: list[RatioAlarm | SharedAlarm] = field(default_factory=list)

    def add(self, counts: Mapping[str, Any]) -> None:
        """Add counts that `to_json` wrote."""
        self.samples += int(counts["samples"])
        self.repeats += int(counts["repeats"])
        self.again += int(counts.get("again", 0))
        self.placed = self.placed or bool(counts.get("after"))
        self.by_source.update({str(name): int(count) for name, count in counts["by_source"].items()})

    def to_json(self) -> dict[str, Any]:
        """Return the counts as plain values."""
        return {"samples": self.samples, "repeats": self.repeats, "again": self.again, "by_source": dict(self.by_source)}

    def text(self) -> str:
        """Return the sentence for the journal and `chronicle data usage`."""
        shares = ", ".join(f"{name} {count / self.samples:.1%}" for name, count in sorted(self.by_source.items()))
        more = f", {self.again:,} read again that only abandoned weights saw" if self.placed else ""
        more += f", {self.shared:,} of them by more than one rank" if self.shared else ""
        return f"launch {self.launch}: {self.samples:,} samples observed, {self.repeats:,} of them read before{more} ({shares})"


class Observer:
    """Counts the samples of one rank in one launch, in a directory shared by all ranks and launches of the run.

    A second observer of the same rank and launch (another epoch) continues the first one's counts.
    """

    def __init__(self, directory: Path, *, launch: int, rank: int = 0, watch_samples: int = 2048, every: int = 512,
                 alarm: Callable[[RatioAlarm | SharedAlarm], None] | None = None) -> None:
        if every < 1:
            raise DataError(f"every is {every}, expected 1 sample or more")
        directory.mkdir(parents=True, exist_ok=True)
        self.now = SampleCounts(launch=launch)
        self._directory, self._rank = directory, rank
        self._watch, self._every, self._alarm = watch_samples, every, alarm
        self._summary, self._keys = _summary_path(directory, launch, rank), _keys_path(directory, launch, rank)
        self._after: tuple[int, int] | None = None
        self._next_check = _CHECK_EVERY
        if self._summary.is_file():
            counts = json.loads(self._summary.read_text(encoding="utf-8"))
            self.now.add(counts)
            self._after = tuple(counts["after"]) if counts.get("after") else None
        self._before: Counter[str] = Counter()
        for account in _summaries(directory):
            if account.launch != launch:
                self._before.update(account.by_source)
        self._read: tuple[KeySet, KeySet] | None = None  # what the weights read, and what only abandoned ones did
        self._pending: list[int] = []

    def take(self, keys: Any, sources: Any) -> None:
        """Count one sample, or the samples of a batch: keys and sources in any nesting, one source for all or one each."""
        if isinstance(keys, str):
            self._pending.append(key_hash(keys))
            self.now.by_source[str(sources)] += 1
            self.now.samples += 1
        else:
            hashes = _hashes(keys)
            names = [sources] if isinstance(sources, str) else [str(name) for name in _flat(sources)]
            if len(names) not in (1, len(hashes)):
                raise DataError(f"{len(names)} sources for {len(hashes)} keys",
                                "return one source for the batch, or one a sample")
            self._pending += hashes
            self.now.by_source.update(names if len(names) == len(hashes) else {names[0]: len(hashes)})
            self.now.samples += len(hashes)
        if len(self._pending) >= self._every:
            self.flush()
        if self._next_check <= self.now.samples <= self._watch:
            self._next_check = self.now.samples // _CHECK_EVERY * _CHECK_EVERY + _CHECK_EVERY
            self._check()

    def flush(self) -> None:
        """Compare the samples since the last time, and write keys and counts. `take` does it every `every` samples."""
        keys = np.array(self._pending, dtype="<u8")
        kept, abandoned = self._read = self._read or self._earlier()
        with self._keys.open("ab") as stream:
            stream.write(keys.tobytes())
        self._pending.clear()
        repeated = kept.add(keys)
        self.now.repeats += int(repeated.sum())
        self.now.again += int(abandoned.holds(keys[~repeated]).sum())
        if self.now.samples <= self._watch:
            self._compare_ranks()
        self._write()

    def state_dict(self) -> dict[str, int]:
        """Return how much this rank read in this launch, for the checkpoint; what was counted is then on disk."""
        self.flush()
        return {"v": STATE_VERSION, "launch": self.now.launch, "samples": self.now.samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Say which checkpoint the weights come from. What was read after it, by every rank, is abandoned."""
        if state.get("v") != STATE_VERSION:
            raise DataError(f"state of an observed loader has version {state.get('v')}, this program reads {STATE_VERSION}")
        if int(state["launch"]) == self.now.launch:  # loaded in the launch that saved it: what came after stays counted
            return
        self._after, self._read, self.now.placed = (int(state["launch"]), int(state["samples"])), None, True
        self._write()

    def _write(self) -> None:
        counts = {**self.now.to_json(), "after": self._after}
        write_atomic(self._summary, json.dumps(counts) + "\n", durable=False)

    def _earlier(self) -> tuple[KeySet, KeySet]:
        """Return the keys of earlier launches and of this rank in this launch, apart from those of abandoned weights."""
        kept, abandoned = _lineage(self._directory, self.now.launch, self._after)
        return KeySet([*kept, (self._keys, 0, _count(self._keys))]), KeySet(abandoned)

    def _compare_ranks(self) -> None:
        own = _read_keys(self._keys)[:self._watch]
        told = {alarm.other for alarm in self.now.alarms if isinstance(alarm, SharedAlarm)}
        for rank in range(max(0, self._rank - _MOST_RANKS), self._rank):
            path = _keys_path(self._directory, self.now.launch, rank)
            if rank not in told and path.is_file():
                shared = len(np.intersect1d(own, _read_keys(path, self._watch)))
                if shared:
                    self._tell(SharedAlarm(rank=self._rank, other=rank, shared=shared, samples=len(own)))

    def _check(self) -> None:
        total = sum(self._before.values())
        if not total:
            return
        alarmed = {alarm.source for alarm in self.now.alarms if isinstance(alarm, RatioAlarm)}
        for source in {*self._before, *self.now.by_source} - alarmed:
            expected = self._before[source] / total
            share = self.now.by_source[source] / self.now.samples
            band = max(_MIN_BAND, _BAND_SDS * math.sqrt(expected * (1 - expected) / self.now.samples))
            if abs(share - expected) > band:
                self._tell(RatioAlarm(source=source, samples=self.now.samples, share=share, expected=expected, band=band))

    def _tell(self, found: RatioAlarm | SharedAlarm) -> None:
        self.now.alarms.append(found)
        if self._alarm:
            self._alarm(found)


class KeySet:
    """Hashes in sorted arrays, each at least twice as large as the next: a key is looked up and moved a few times only.

    `spans` are parts of files of keys: path, first key, end. They are read into one array and sorted where they lie.
    """

    def __init__(self, spans: Iterable[Span]) -> None:
        wanted = [(path, first, end) for path, first, end in spans if end > first]
        keys = np.empty(sum(end - first for _, first, end in wanted), dtype="<u8")
        filled = 0
        for path, first, end in wanted:
            with open(path, "rb", buffering=0) as stream:
                stream.seek(8 * first)
                rest = keys[filled:filled + end - first].data.cast("B")
                while rest and (count := stream.readinto(rest)):  # one call reads 2 GB at most
                    rest = rest[count:]
            filled += end - first
        keys.sort()
        self._levels: list[Hashes] = [keys] if len(keys) else []

    def holds(self, keys: Hashes) -> NDArray[np.bool_]:
        """Return which keys are in the set."""
        found = np.zeros(len(keys), dtype=bool)
        for level in self._levels:
            places = np.minimum(np.searchsorted(level, keys), len(level) - 1)
            found |= level[places] == keys
        return found

    def add(self, keys: Hashes) -> NDArray[np.bool_]:
        """Add keys, and return which of them were there before, an equal one further in front included."""
        order = np.argsort(keys, kind="stable")
        ordered = keys[order]
        found = self.holds(ordered)
        found[1:] |= ordered[1:] == ordered[:-1]
        fresh = ordered[~found]
        while self._levels and len(self._levels[-1]) < 2 * len(fresh):
            fresh = np.concatenate([self._levels.pop(), fresh])
            fresh.sort(kind="stable")
        if len(fresh):
            self._levels.append(fresh)
        repeated = np.empty_like(found)
        repeated[order] = found
        return repeated


class Observed(Generic[T]):
    """A loader under observation: the same samples, length and attributes; iterating again is another pass."""

    def __init__(self, inner: Iterable[T], observer: Observer, key: Callable[[T], Any], source: Callable[[T], Any],
                 run: RunPaths | None) -> None:
        self._inner, self.observer, self._key, self._source, self._run = inner, observer, key, source, run

    def __iter__(self) -> Iterator[T]:
        take, key, source = self.observer.take, self._key, self._source
        try:
            for sample in self._inner:
                take(key(sample), source(sample))
                yield sample
        finally:
            self.observer.flush()
            if self._run is not None and self.observer.now.samples:
                _journal(self._run, self.observer.now.launch, DataObserved(), self.observer.now.text())

    def __len__(self) -> int:
        return len(self._inner)  # type: ignore[arg-type]  # its TypeError where it has none

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner, name)

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank read, and the loader's own state where it has one."""
        inner = getattr(self._inner, "state_dict", None)
        return {**self.observer.state_dict(), "loader": None if inner is None else inner()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the checkpoint that holds this state, before the first sample is read."""
        if state.get("loader") is not None:
            self._inner.load_state_dict(state["loader"])  # type: ignore[attr-defined]
        self.observer.load_state_dict(state)


def observe(iterable: Iterable[T], directory: str | Path | None = None, *, key: Callable[[T], Any],
            source: Callable[[T], Any], launch: int | None = None, rank: int | None = None,
            environ: Mapping[str, str] = os.environ, **options: Any) -> Observed[T]:
    """Return a loader that yields what `iterable` yields, and writes the counts to `directory`.

    `key` returns what identifies a sample (text or a whole number), or for a batch a list, array or tensor of them; `source` a
    name, or one a sample. Options: `every` (samples between two writings, 512), `watch_samples` (2,048), `alarm`. Under
    `chronicle run` directory, launch and rank are known. Elsewhere name the directory; the launch is then one more than this
    rank's last one there. Raises DataError when no directory is known.
    """
    run = RunPaths(Path(environ["CHRONICLE_RUN_DIR"])) if environ.get("CHRONICLE_RUN_DIR") else None
    if directory is None:
        if run is None:
            raise DataError("observe has no directory for its counts",
                            "name a directory, or start with `chronicle run`")
        directory = run.observed_dir
    place = Path(directory)
    number = int(environ.get("RANK") or 0) if rank is None else rank
    if launch is None:
        launch = int(environ.get("CHRONICLE_LAUNCH") or _next_launch(place, number))
    options = {"alarm": lambda found: _tell(run, launch, found), **options}
    return Observed(iterable, Observer(place, launch=launch, rank=number, **options), key, source, run)


def read_accounts(directory: Path) -> list[SampleCounts]:
    """Return the counts per launch, summed over ranks, with the samples that several ranks read; none where there are none."""
    found = _summaries(directory)
    for account in found:
        ranks = [np.unique(_read_keys(path)) for path in sorted(directory.glob(f"keys-{account.launch:04d}-rank-*.bin"))]
        if len(ranks) > 1:
            account.shared = sum(map(len, ranks)) - len(np.unique(np.concatenate(ranks)))
    return found


def _summaries(directory: Path) -> list[SampleCounts]:
    found: dict[int, SampleCounts] = {}
    for path in sorted(directory.glob("observed-*-rank-*.json")):
        launch = int(path.name.split("-")[1])
        found.setdefault(launch, SampleCounts(launch=launch)).add(json.loads(path.read_text(encoding="utf-8")))
    return [found[launch] for launch in sorted(found)]


def _lineage(directory: Path, launch: int, after: tuple[int, int] | None) -> tuple[list[Span], list[Span]]:
    """Return the keys of earlier launches that the weights of a launch read, and the others.

    A state names a launch and how far it had read; that launch's own state names the one before. Where a launch has none, all
    before it counts as read by the weights.
    """
    limits: dict[int, int] = {}
    oldest = launch
    while after is not None and after[0] < oldest:
        oldest, limits[after[0]] = after
        summary = next(iter(sorted(directory.glob(f"observed-{oldest:04d}-rank-*.json"))), None)
        told = None if summary is None else json.loads(summary.read_text(encoding="utf-8")).get("after")
        after = None if told is None else (int(told[0]), int(told[1]))
    kept, abandoned = [], []
    for path in sorted(directory.glob("keys-*-rank-*.bin")):
        number, count = int(path.name.split("-")[1]), _count(path)
        if number < launch:
            limit = min(count, limits.get(number, count if number < oldest else 0))
            kept.append((path, 0, limit))
            abandoned.append((path, limit, count))
    return kept, abandoned


def _hashes(keys: Any) -> list[int]:
    """Return the hashes of keys; arrays of whole numbers at once."""
    flat = _flat(keys)
    if isinstance(flat, np.ndarray) and flat.dtype.kind in "iu":
        values = flat.astype(np.uint64)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # splitmix64 (Steele et al., 2014)
            values = (values ^ values >> np.uint64(shift)) * np.uint64(factor)
        found: list[int] = ((values ^ values >> np.uint64(31)) >> np.uint64(1)).tolist()
        return found
    return [key_hash(one) if isinstance(one, str) else _hashes(np.array([one]))[0] if isinstance(one, int)
            else _unhashable(one) for one in flat]


def _unhashable(one: Any) -> int:
    raise DataError(f"the key of a sample is a {type(one).__name__}", "return text or a whole number for each sample")


def _flat(value: Any) -> Sequence[Any] | NDArray[Any]:
    """Return the keys of a batch: a list, a tuple, an array or a tensor of them; any other value is one key."""
    if hasattr(value, "detach"):  # a tensor, on any device
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray | np.generic):
        flat = np.asarray(value).ravel()
        return flat if flat.dtype.kind in "iu" else flat.tolist()
    return value if isinstance(value, list | tuple) else [value]


def _next_launch(directory: Path, rank: int) -> int:
    return 1 + max((int(path.name.split("-")[1]) for path in directory.glob(f"observed-*-rank-{rank}.json")), default=0)


def _tell(run: RunPaths | None, launch: int | None, found: RatioAlarm | SharedAlarm) -> None:
    print(f"chronicle: {found.text()}", file=sys.stderr)
    if run is not None:
        _journal(run, launch, DataRatio() if isinstance(found, RatioAlarm) else DataObserved(), found.text())


def _journal(run: RunPaths, launch: int | None, event: JournalEvent, text: str) -> None:
    with JournalWriter(run) as journal:
        journal.write(event, launch=launch, title=text)


def _summary_path(directory: Path, launch: int, rank: int) -> Path:
    return directory / f"observed-{launch:04d}-rank-{rank}.json"


def _keys_path(directory: Path, launch: int, rank: int) -> Path:
    return directory / f"keys-{launch:04d}-rank-{rank}.bin"


def _count(path: Path) -> int:
    return path.stat().st_size // 8 if path.is_file() else 0


def _read_keys(path: Path, most: int = -1) -> Hashes:
    """Return the whole keys of a file, at most so many; a crash may leave a part of one."""
    if not path.is_file():
        return np.empty(0, np.uint64)
    keys: Hashes = np.fromfile(path, dtype="<u8", count=most)
    return keys

"""Count repeats and source ratios of any data loader, by observing the samples it yields.

    for sample in observe(loader, key=lambda s: s["__key__"], source=lambda s: s["__url__"].split("/")[-2]):

WebDataset reshuffles at every start and does not know what was read before; Hugging Face's iterable datasets lose the
content of their shuffle buffer. `observe` passes every sample through unchanged, appends the hash of its key to
`keys-<launch>-rank-<r>.bin` and counts the samples of each source. After a restart it counts repeated samples. When the
share of a source in the first samples is outside the band of earlier launches (seed 003: the image-to-text dip), it writes
one line to stderr and one journal entry, unless `alarm` is given. `chronicle data usage` shows the counts of a run.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from chronicle.data.shards import key_hash
from chronicle.errors import DataError
from chronicle.journal import JournalWriter
from chronicle.journal.events import DataObserved, DataRatio, JournalEvent
from chronicle.paths import RunPaths
from rollback.disk.durable import write_atomic

T = TypeVar("T")

_BUFFER = 512
_BAND_SDS = 4.0
_MIN_BAND = 0.02
_CHECK_EVERY = 32


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


@dataclass(slots=True, kw_only=True)
class SampleCounts:
    """Counts of one launch. `repeats`: samples that were read before, in an earlier launch or in this one."""

    launch: int
    samples: int = 0
    repeats: int = 0
    by_source: Counter[str] = field(default_factory=Counter)
    alarms: list[RatioAlarm] = field(default_factory=list)

    def add(self, counts: Mapping[str, Any]) -> None:
        """Add counts that `to_json` wrote."""
        self.samples += int(counts["samples"])
        self.repeats += int(counts["repeats"])
        self.by_source.update({str(name): int(count) for name, count in counts["by_source"].items()})

    def to_json(self) -> dict[str, Any]:
        """Return the counts as plain values."""
        return {"samples": self.samples, "repeats": self.repeats, "by_source": dict(self.by_source)}

    def text(self) -> str:
        """Return the sentence for the journal and `chronicle data usage`."""
        shares = ", ".join(f"{name} {count / self.samples:.1%}" for name, count in sorted(self.by_source.items()))
        return f"launch {self.launch}: {self.samples:,} samples observed, {self.repeats:,} of them read before ({shares})"


class Observer:
    """Counts the samples of one rank in one launch, in a directory shared by all ranks and launches of the run.

    A second observer of the same rank and launch (another epoch) continues the first one's counts. Above `most_in_a_set`
    keys, those of this launch are merged into a sorted array with eight bytes per key.
    """

    def __init__(self, directory: Path, *, launch: int, rank: int = 0, watch_samples: int = 2048,
                 most_in_a_set: int = 1_000_000, alarm: Callable[[RatioAlarm], None] | None = None) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.now = SampleCounts(launch=launch)
        self._watch, self._alarm, self._most_in_a_set = watch_samples, alarm, most_in_a_set
        self._summary = directory / f"observed-{launch:04d}-rank-{rank}.json"
        self._keys = directory / f"keys-{launch:04d}-rank-{rank}.bin"
        if self._summary.is_file():
            self.now.add(json.loads(self._summary.read_text(encoding="utf-8")))
        self._before: Counter[str] = Counter()
        for account in read_accounts(directory):
            if account.launch != launch:
                self._before.update(account.by_source)
        self._read = np.unique(np.concatenate([_read_keys(path) for path in directory.glob("keys-*.bin")]
                                              or [np.empty(0, np.uint64)]))
        self._new: set[int] = set()
        self._pending: list[int] = []

    def take(self, key: str, source: str) -> None:
        """Count one sample."""
        number = key_hash(key)
        self.now.samples += 1
        self.now.repeats += number in self._new or self._was_read(number)
        self._new.add(number)
        self.now.by_source[source] += 1
        self._pending.append(number)
        if len(self._pending) >= _BUFFER:
            self.flush()
        if self.now.samples <= self._watch and self.now.samples % _CHECK_EVERY == 0:
            self._check()

    def flush(self) -> None:
        """Write the counts to disk. `take` does this every 512 samples, `observe` at the end."""
        with self._keys.open("ab") as stream:
            stream.write(np.array(self._pending, dtype="<u8").tobytes())
        self._pending.clear()
        write_atomic(self._summary, json.dumps(self.now.to_json()) + "\n", durable=False)
        if len(self._new) > self._most_in_a_set:
            self._read = np.union1d(self._read, np.fromiter(self._new, np.uint64, len(self._new)))
            self._new.clear()

    def _was_read(self, number: int) -> bool:
        place = int(np.searchsorted(self._read, np.uint64(number)))
        return place < len(self._read) and int(self._read[place]) == number

    def _check(self) -> None:
        total = sum(self._before.values())
        if not total:
            return
        alarmed = {alarm.source for alarm in self.now.alarms}
        for source in {*self._before, *self.now.by_source} - alarmed:
            expected = self._before[source] / total
            share = self.now.by_source[source] / self.now.samples
            band = max(_MIN_BAND, _BAND_SDS * math.sqrt(expected * (1 - expected) / self.now.samples))
            if abs(share - expected) > band:
                found = RatioAlarm(source=source, samples=self.now.samples, share=share, expected=expected, band=band)
                self.now.alarms.append(found)
                if self._alarm:
                    self._alarm(found)


def observe(iterable: Iterable[T], directory: str | Path | None = None, *, key: Callable[[T], str],
            source: Callable[[T], str], launch: int | None = None, rank: int | None = None,
            environ: Mapping[str, str] = os.environ, **options: Any) -> Iterator[T]:
    """Yield every sample of `iterable` unchanged and write the counts to `directory`.

    Under `chronicle run` directory, launch and rank are known. Elsewhere name the directory; the launch is then one more
    than this rank's last one there. Raises DataError when no directory is known.
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
    options = {"alarm": lambda found: _tell(run, launch, found.text()), **options}
    return _pass_through(iterable, Observer(place, launch=launch, rank=number, **options), key, source, run)


def read_accounts(directory: Path) -> list[SampleCounts]:
    """Return the counts per launch, summed over ranks; an empty list when there are none."""
    found: dict[int, SampleCounts] = {}
    for path in sorted(directory.glob("observed-*-rank-*.json")):
        launch = int(path.name.split("-")[1])
        found.setdefault(launch, SampleCounts(launch=launch)).add(json.loads(path.read_text(encoding="utf-8")))
    return [found[launch] for launch in sorted(found)]


def _pass_through(iterable: Iterable[T], observer: Observer, key: Callable[[T], str], source: Callable[[T], str],
                  run: RunPaths | None) -> Iterator[T]:
    try:
        for sample in iterable:
            observer.take(key(sample), source(sample))
            yield sample
    finally:
        observer.flush()
        if run is not None and observer.now.samples:
            _journal(run, observer.now.launch, DataObserved(), observer.now.text())


def _next_launch(directory: Path, rank: int) -> int:
    return 1 + max((int(path.name.split("-")[1]) for path in directory.glob(f"observed-*-rank-{rank}.json")), default=0)


def _tell(run: RunPaths | None, launch: int | None, text: str) -> None:
    print(f"chronicle: {text}", file=sys.stderr)
    if run is not None:
        _journal(run, launch, DataRatio(), text)


def _journal(run: RunPaths, launch: int | None, event: JournalEvent, text: str) -> None:
    with JournalWriter(run) as journal:
        journal.write(event, launch=launch, title=text)


def _read_keys(path: Path) -> NDArray[np.uint64]:
    content = path.read_bytes()
    return np.frombuffer(content[:len(content) // 8 * 8], dtype="<u8").astype(np.uint64)  # a crash may leave a partial key

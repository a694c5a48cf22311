"""The same accounting for loaders that are not ours: watch what they yield, count repeats and ratios after the fact.

    for sample in observe(loader, directory, key=lambda s: s["__key__"], source=lambda s: s["__url__"].split("/")[-2]):

Stock WebDataset reshuffles at every start and knows nothing of what was read before. `observe` appends the hash of every
key to `<directory>/keys-<launch>.bin` and remembers the share of each source; after a restart it counts what came again
and raises an alarm while a source's share in the first samples lies outside the band of the launches before (the
image-to-text dip of seed 003). It passes every sample through unchanged.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from chronicle.data.index import key_hash

T = TypeVar("T")

_BUFFER = 512
_BAND_SDS = 4.0
_MIN_BAND = 0.02
_CHECK_EVERY = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioAlarm:
    """A source's share right after a start lies outside the band of the launches before."""

    source: str
    samples: int
    share: float
    expected: float
    band: float

    def text(self) -> str:
        """Return the sentence for the journal."""
        return (f"share of `{self.source}` is {self.share:.3f} over the first {self.samples} samples of this launch, "
                f"{self.expected:.3f} ± {self.band:.3f} before")


@dataclass(slots=True, kw_only=True)
class Observation:
    """Counts of one launch; `repeats` came in an earlier launch or earlier in this one."""

    samples: int = 0
    repeats: int = 0
    by_source: Counter[str] = field(default_factory=Counter)
    alarms: list[RatioAlarm] = field(default_factory=list)


class Observer:
    """Keeps the accounts of one launch in a directory that all launches of the run share."""

    def __init__(self, directory: Path, *, launch: int = 0, watch_samples: int = 2048,
                 alarm: Callable[[RatioAlarm], None] | None = None) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.now = Observation()
        self._watch, self._alarm = watch_samples, alarm
        self._summary = directory / f"observed-{launch:04d}.json"
        self._keys = directory / f"keys-{launch:04d}.bin"
        self._seen: set[int] = set()
        self._before: Counter[str] = Counter()
        for path in sorted(directory.glob("keys-*.bin")):
            content = path.read_bytes()
            self._seen.update(int.from_bytes(content[i:i + 8], "little") for i in range(0, len(content) // 8 * 8, 8))
        for path in sorted(directory.glob("observed-*.json")):
            self._before.update(json.loads(path.read_text(encoding="utf-8"))["by_source"])
        self._pending = bytearray()

    def take(self, key: str, source: str) -> None:
        """Count one sample."""
        number = key_hash(key)
        self.now.samples += 1
        self.now.repeats += number in self._seen
        self._seen.add(number)
        self.now.by_source[source] += 1
        self._pending += number.to_bytes(8, "little")
        if len(self._pending) >= 8 * _BUFFER:
            self.flush()
        if self.now.samples <= self._watch and self.now.samples % _CHECK_EVERY == 0:
            self._check()

    def flush(self) -> None:
        """Bring the accounts to disk; called by itself every 512 samples and at the end."""
        with self._keys.open("ab") as stream:
            stream.write(bytes(self._pending))
        self._pending.clear()
        summary = {"samples": self.now.samples, "repeats": self.now.repeats, "by_source": dict(self.now.by_source)}
        self._summary.write_text(json.dumps(summary) + "\n", encoding="utf-8")

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


def observe(iterable: Iterable[T], directory: str | Path, *, key: Callable[[T], str], source: Callable[[T], str],
            launch: int = 0, **options: Any) -> Iterator[T]:
    """Yield every sample of `iterable` unchanged, keeping the accounts in `directory`."""
    observer = Observer(Path(directory), launch=launch, **options)
    try:
        for sample in iterable:
            observer.take(key(sample), source(sample))
            yield sample
    finally:
        observer.flush()

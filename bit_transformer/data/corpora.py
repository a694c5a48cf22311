"""Named texts in memory, without repeats, split into training and held-out text. No torch.

`chronicle.data.corpora` lists the names; `chronicle.data.shards` reads sources that were built on disk. Looking for repeats
takes a second for 10 MB, so the text without them is kept in the user's cache, under the digest of the text.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from bit_transformer.errors import BadRecipe
from chronicle.data import DataError
from chronicle.data.corpora import read_text
from chronicle.data.repeats import without_repeats
from chronicle.data.shards import split_text
from rollback.disk.durable import write_atomic


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Training text and held-out text of one source; `digest` is the sha256 of both."""

    name: str
    train: bytes
    held_out: bytes
    digest: str


@lru_cache(maxsize=4)
def read_corpus(name: str) -> Corpus:
    """Read a corpus by name. Raises BadRecipe where it is not available."""
    try:
        return split_corpus(name, _without_repeats(read_text(name)))
    except DataError as problem:
        raise BadRecipe(str(problem), problem.remedy) from problem


def split_corpus(name: str, text: bytes) -> Corpus:
    """Hold out every twentieth stretch of 16 KiB of a text without repeats; the rest is for training."""
    parts = {split: b"".join(stretches) for split, stretches in split_text(text).items()}
    return Corpus(name=name, train=parts["train"], held_out=parts["held_out"], digest=hashlib.sha256(text).hexdigest())


_CACHED = "v1"  # changes with what `without_repeats` leaves


def _without_repeats(text: bytes) -> bytes:
    path = _cache() / f"{hashlib.sha256(text).hexdigest()}-{_CACHED}"
    try:
        digest, _, kept = path.read_bytes().partition(b"\n")
        if digest == hashlib.sha256(kept).hexdigest().encode():
            return kept
    except OSError:
        pass
    kept = without_repeats(text)
    with suppress(OSError):  # a cache that cannot be written is no cache
        if os.environ.get("CHRONICLE_CACHE") == "off":
            return kept
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, hashlib.sha256(kept).hexdigest().encode() + b"\n" + kept, durable=False)
    return kept


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path(os.environ.get("HOME") or "/nonexistent") / ".cache"
    return Path(base) / "chronicle" / "texts"

"""Named texts in memory, split into training and held-out text. No torch.

`chronicle.data.corpora` lists the names; `chronicle.data.shards` reads sources that were built on disk.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache

from bit_transformer.errors import BadRecipe
from chronicle.data import DataError
from chronicle.data.corpora import read_text
from chronicle.data.shards import split_text


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
        return split_corpus(name, read_text(name))
    except DataError as problem:
        raise BadRecipe(str(problem), problem.remedy) from problem


def split_corpus(name: str, text: bytes) -> Corpus:
    """Hold out every twentieth stretch of 16 KiB; the rest is for training."""
    parts = {split: b"".join(stretches) for split, stretches in split_text(text).items()}
    return Corpus(name=name, train=parts["train"], held_out=parts["held_out"], digest=hashlib.sha256(text).hexdigest())

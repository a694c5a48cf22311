"""Real text without a download: what this Python installation already carries.

`code` is the standard library's own sources, `reference` the language reference in reST that ships inside it
(`pydoc_data/topics.py`). Text is cut into windows of whole bytes; every twentieth stretch of text is held out.
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from bit_transformer.errors import BadRecipe

_SKIPPED_DIRECTORIES = frozenset({"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__",
                                  "pydoc_data", "encodings", "lib2to3"})
_HELD_OUT_EVERY = 20
_STRETCH_BYTES = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Training text and held-out text of one source; `digest` is the sha256 of both."""

    name: str
    train: bytes
    held_out: bytes
    digest: str


@lru_cache(maxsize=4)
def read_corpus(name: str) -> Corpus:
    """Read a built-in corpus by name. Raises BadRecipe for an unknown name or a Python without its sources."""
    if name not in _READERS:
        raise BadRecipe(f"unknown corpus `{name}`, expected one of {', '.join(sorted(_READERS))}")
    return split_corpus(name, _READERS[name]())


def split_corpus(name: str, text: bytes) -> Corpus:
    """Hold out every twentieth stretch of 16 KiB; the rest is for training."""
    stretches = [text[start:start + _STRETCH_BYTES] for start in range(0, len(text), _STRETCH_BYTES)]
    held_out = b"".join(stretches[_HELD_OUT_EVERY - 1::_HELD_OUT_EVERY])
    train = b"".join(part for number, part in enumerate(stretches, 1) if number % _HELD_OUT_EVERY)
    if not held_out:
        raise BadRecipe(f"corpus `{name}` has {len(text)} bytes, expected {_HELD_OUT_EVERY * _STRETCH_BYTES} or more")
    return Corpus(name=name, train=train, held_out=held_out, digest=hashlib.sha256(text).hexdigest())


def _stdlib_code() -> bytes:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in root.rglob("*.py") if not _SKIPPED_DIRECTORIES & set(path.relative_to(root).parts))
    return b"".join(path.read_bytes() for path in files)


def _language_reference() -> bytes:
    path = Path(sysconfig.get_paths()["stdlib"]) / "pydoc_data" / "topics.py"
    if not path.is_file():
        raise BadRecipe(f"corpus `reference` needs `{path}`, which this Python lacks")
    assigned = next(node.value for node in ast.parse(path.read_text()).body if isinstance(node, ast.Assign))
    topics: dict[str, str] = ast.literal_eval(assigned)
    return "\n\n".join(topics[key] for key in sorted(topics)).encode()


_READERS = {"code": _stdlib_code, "reference": _language_reference}

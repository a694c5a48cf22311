"""Random states told apart without loading them: a digest of what a rank's RNG file holds."""

from __future__ import annotations

import zlib

from rollback.files.pickle_values import ArrayRef, TensorRef
from rollback.files.torch_tree import TorchFile

_NO_GENERATOR = {"step"}


def rng_digest(file: TorchFile) -> str:
    """A short digest of every generator's state: numbers, arrays, and the checksums of tensor records.

    Two ranks with equal digests will draw the same numbers. Counters that are no random state are left out. Two CRCs
    rather than a cryptographic hash: ranks are told apart here, not attackers.
    """
    parts: list[bytes] = []
    checksums = _checksums(file)
    for leaf in file.leaves():
        if leaf.keys and leaf.keys[0] in _NO_GENERATOR:
            continue
        value = leaf.value
        if isinstance(value, TensorRef):
            key = value.storage.key if value.storage else ""
            parts.append(f"{leaf.keys}{value.dtype}{value.shape}{checksums.get(key)}".encode())
        elif isinstance(value, ArrayRef):
            parts.append(f"{leaf.keys}{value.dtype}{value.shape}".encode() + (value.content or b""))
        else:
            parts.append(f"{leaf.keys}{value!r}".encode("utf-8", "backslashreplace"))
    content = b"\0".join(parts)
    return f"{zlib.crc32(content):08x}{zlib.adler32(content):08x}"


def _checksums(file: TorchFile) -> dict[str, int]:
    layouts = [segment.layout for segment in file.segments if segment.layout is not None]
    return {record.name.rpartition("/")[2]: record.crc for layout in layouts for record in layout.records}

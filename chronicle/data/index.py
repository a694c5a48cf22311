"""Offset index of a WebDataset tar: one scan, then any sample by position without opening the archive again.

`<shard>.tar.idx` holds one JSON line (version, count, size of the tar) and then little-endian int64 rows
(offset, size, key hash) of every regular member. A tar that ends in the middle of a member, or without its two closing
zero blocks, is truncated: a crash while copying looks exactly like that. Local files or, through fsspec, remote ones.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from chronicle.data.errors import ShardProblem

INDEX_VERSION = 1
_BLOCK = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardIndex:
    """Where each sample of a shard lies. `rows` is (n, 3): offset, size, key hash."""

    tar_bytes: int
    rows: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.rows)


def key_hash(key: str) -> int:
    """Return 63 bits of a key, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") >> 1


def index_path(shard: str) -> str:
    """Return where the index of a shard lies: beside it."""
    return f"{shard}.idx"


def scan_tar(shard: str) -> ShardIndex:
    """Read a tar's headers once. Raises ShardProblem where it is missing, truncated or no tar."""
    size = shard_bytes(shard)
    rows = []
    end = 0
    try:
        with open_shard(shard) as stream, tarfile.open(fileobj=stream, mode="r:") as tar:
            for member in tar:
                if member.isreg():
                    rows.append((member.offset_data, member.size, key_hash(member.name.rpartition("/")[2].split(".")[0])))
                end = member.offset_data + -(-member.size // _BLOCK) * _BLOCK
    except (tarfile.TarError, EOFError) as problem:
        raise ShardProblem(f"shard `{shard}` cannot be read as a tar: {problem}", "build or copy it again") from problem
    if end + 2 * _BLOCK > size:
        raise ShardProblem(f"shard `{shard}` is truncated: {size} bytes, expected at least {end + 2 * _BLOCK}",
                           "build or copy it again")
    return ShardIndex(tar_bytes=size, rows=np.array(rows, dtype=np.int64).reshape(-1, 3))


def write_index(shard: str, index: ShardIndex) -> None:
    """Write the index beside a local shard, complete or not at all."""
    head = {"v": INDEX_VERSION, "count": len(index), "tar_bytes": index.tar_bytes}
    target = Path(index_path(shard))
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    temporary.write_bytes(json.dumps(head).encode() + b"\n" + index.rows.astype("<i8").tobytes())
    os.replace(temporary, target)


def read_index(shard: str) -> ShardIndex:
    """Read the index of a shard; without one, scan the tar. Raises ShardProblem where index and tar disagree."""
    path = index_path(shard)
    try:
        with open_shard(path) as stream:
            content = stream.read()
    except ShardProblem:
        return scan_tar(shard)
    head, _, body = content.partition(b"\n")
    try:
        fields = json.loads(head)
        rows = np.frombuffer(body, dtype="<i8").reshape(-1, 3).astype(np.int64)
    except ValueError as problem:
        raise ShardProblem(f"index `{path}` cannot be read: {problem}", "delete it; it is made again") from problem
    if fields.get("v") != INDEX_VERSION or fields.get("count") != len(rows):
        raise ShardProblem(f"index `{path}` has version {fields.get('v')} and {len(rows)} rows, expected version "
                           f"{INDEX_VERSION} and {fields.get('count')} rows", "delete it; it is made again")
    size = shard_bytes(shard)
    if fields["tar_bytes"] != size:
        raise ShardProblem(f"shard `{shard}` has {size} bytes, its index was made for {fields['tar_bytes']}",
                           "copy the shard again, or delete the index if the shard is right")
    return ShardIndex(tar_bytes=size, rows=rows)


def is_remote(shard: str) -> bool:
    """Whether a shard is named by a URL that fsspec reads (`s3://…`, `memory://…`)."""
    return "://" in shard


@contextmanager
def open_shard(shard: str) -> Iterator[IO[bytes]]:
    """Open a shard for reading. Raises ShardProblem where it is not there."""
    try:
        if is_remote(shard):
            filesystem, path = _filesystem(shard)
            opened = filesystem.open(path, "rb")
        else:
            opened = open(shard, "rb")  # noqa: SIM115 closed below, after the caller is done
    except OSError as problem:
        raise ShardProblem(f"shard `{shard}` cannot be opened: {_reason(problem)}",
                           "build it with `chronicle data build`, or correct the path") from problem
    with opened as stream:
        yield stream


def shard_bytes(shard: str) -> int:
    """Return the size of a shard."""
    if is_remote(shard):
        filesystem, path = _filesystem(shard)
        try:
            return int(filesystem.size(path))
        except OSError as problem:
            raise ShardProblem(f"shard `{shard}` cannot be found: {problem}") from problem
    with open_shard(shard) as stream:
        return stream.seek(0, io.SEEK_END)


class ShardReader:
    """Reads parts of one shard by offset; the descriptor is opened at the first read, in the process that reads."""

    def __init__(self, shard: str) -> None:
        self.shard = shard
        self._descriptor = -1
        self._process = 0

    def read(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset`. Raises ShardProblem where the shard ends before."""
        if is_remote(self.shard):
            filesystem, path = _filesystem(self.shard)
            try:
                content = bytes(filesystem.cat_file(path, start=offset, end=offset + size))
            except OSError as problem:
                raise ShardProblem(f"shard `{self.shard}` cannot be read: {_reason(problem)}") from problem
        else:
            if self._descriptor < 0 or self._process != os.getpid():  # a forked worker opens its own
                try:
                    self._descriptor, self._process = os.open(self.shard, os.O_RDONLY), os.getpid()
                except OSError as problem:
                    raise ShardProblem(f"shard `{self.shard}` cannot be opened: {problem.strerror}") from problem
            content = os.pread(self._descriptor, size, offset)
        if len(content) != size:
            raise ShardProblem(f"shard `{self.shard}` ends at byte {offset + len(content)}, expected {offset + size}",
                               "it was truncated while training; verify the data")
        return content


def _reason(problem: OSError) -> str:
    """What the system said; fsspec calls everything "not found", and what it was about is the error behind it."""
    return str(problem.__cause__ or problem.strerror or problem)


def _filesystem(url: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]
    except ImportError as problem:
        raise ShardProblem(f"remote shard `{url}` needs fsspec", "pip install fsspec") from problem
    try:
        filesystem, path = url_to_fs(url)
    except (ImportError, ValueError) as problem:  # the package for this protocol is missing, or there is no such protocol
        raise ShardProblem(f"remote shard `{url}` cannot be opened: {problem}",
                           "install what fsspec names, or correct the address") from problem
    return filesystem, path

"""Forms in which shards lie: what a file's name says of it, and the forms in which a sample has no place of its own.

    tar, lines, file                        bytes from a place to a place: read where they lie, remote ones by ranges
    … .gz .zst .xz .bz2, .tgz               one stream, entered at its beginning only
    rows: Arrow (IPC file or stream)        mapped into memory, a row is read where it lies
    rows: Parquet, compressed or remote Arrow    compressed pages of columns

The second and the last line are unpacked once a machine into a cache, whole, when one of their samples is first read. A zstd
frame has no entry points (each block needs those before it), and a gzip stream has one only with 32 KB of what came before, for
each: an index that keeps them would be as large as some shards. Parquet could be read by row groups, but a plan's next sample
lies in another one: a group of 100,000 rows would be decoded for one of them. The name of an unpacked shard is the sha256 of
the packed one, so a cache serves every run, plan and rank of a machine, and a changed shard is found while it is unpacked.
"""

from __future__ import annotations

import bz2
import fcntl
import gzip
import hashlib
import io
import json
import lzma
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import numpy as np

from chronicle.data.shards import ShardProblem, is_remote, open_shard
from chronicle.errors import DataError

KINDS = {".tar": "tar", ".jsonl": "lines", ".ndjson": "lines", ".txt": "file", ".md": "file", ".parquet": "rows",
         ".arrow": "rows"}
PACKINGS = (".gz", ".zst", ".xz", ".bz2")
ARROW = "rows.arrow"
ARROW_PACKED = "rows.arrow.packed"  # its buffers are compressed
ROWS_A_BATCH = 1024  # of an unpacked table
DAMAGED = (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError, OSError, ValueError)


def shard_form(name: str) -> str:
    """Return the form of a file by its name: a kind, with the packing behind a dot where it is packed; "" for no shard.

    `.json` alone is no shard (it may be one value); packed, as published corpora have it, it is taken for lines.
    """
    stem, suffix = os.path.splitext(name)
    if suffix == ".tgz":
        return "tar.gz"
    if suffix in PACKINGS:
        kind = "lines" if stem.endswith(".json") else KINDS.get(os.path.splitext(stem)[1], "")
        return f"{kind}{suffix}" if kind not in ("", "rows") else ""
    kind = KINDS.get(suffix, "")
    return f"{kind}{suffix}" if kind == "rows" else kind


def kind_of(form: str) -> str:
    """Return `tar`, `lines`, `file` or `rows`."""
    return form.partition(".")[0]


def is_packed(form: str, *, remote: bool = False) -> bool:
    """Whether shards of a form are read from a cache."""
    return "." in form and (form != ARROW or remote)


# --- Streams


def unpacked(stream: IO[bytes], form: str) -> IO[bytes]:
    """Return the stream that a packed stream holds; reading it raises one of `DAMAGED` where it is cut or changed."""
    packing = form.rpartition(".")[2]
    if packing == "zst":
        return io.BufferedReader(_Frames(stream), 1 << 20)
    kinds: dict[str, Callable[[IO[bytes]], Any]] = {
        "gz": lambda packed: gzip.GzipFile(fileobj=packed, mode="rb"), "xz": lzma.LZMAFile, "bz2": bz2.BZ2File}
    return io.BufferedReader(kinds[packing](stream), 1 << 20)


class _Frames(io.RawIOBase):
    """The content of zstd frames, one behind the other; zstandard's own reader does not tell a cut frame from its end."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._left = stream, b""
        self._frame: Any = None
        self._decoder = _needed("zstandard", "a zstd shard").ZstdDecompressor(max_window_size=2**31)
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            packed = self._left or self._stream.read(1 << 20)
            self._left = b""
            if not packed:
                if self._frame is not None:
                    raise EOFError("the last zstd frame is cut")
                return 0
            self._frame = self._frame or self._decoder.decompressobj()
            try:
                self._ready = self._frame.decompress(packed)
            except Exception as problem:  # its error class has no other name
                raise ValueError(f"not a zstd frame ({problem})") from problem
            if self._frame.eof:
                self._left, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count


# --- Tables


def table_batches(path: str) -> Iterator[Any]:
    """Yield the record batches of a Parquet or Arrow file, local or remote. Raises ShardProblem for another content."""
    arrow = _needed("pyarrow", "a Parquet or Arrow shard")
    try:
        if path.endswith(".parquet"):
            with open_shard(path) as stream:
                yield from import_module("pyarrow.parquet").ParquetFile(stream).iter_batches(batch_size=ROWS_A_BATCH)
        elif is_remote(path):
            with open_shard(path) as stream:
                yield from _arrow_batches(stream)
        else:
            with arrow.memory_map(path) as stream:
                yield from _arrow_batches(stream)
    except (arrow.ArrowInvalid, arrow.ArrowNotImplementedError, OSError) as problem:
        reason = str(problem).partition("\n")[0].rstrip(".")
        raise ShardProblem(f"shard `{path}` cannot be read: {reason}", "copy it again, or leave it out") from problem


def _arrow_batches(stream: Any) -> Iterator[Any]:
    """Batches of an IPC file or of a stream, which is what Hugging Face's `datasets` writes; an empty file has none."""
    ipc = import_module("pyarrow.ipc")
    start = stream.read(6)
    stream.seek(0)
    if start == b"ARROW1":
        reader = ipc.open_file(stream)
        yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
    elif start:
        yield from ipc.open_stream(stream)


def is_mapped(path: str) -> bool:
    """Whether the rows of an Arrow file are read where they lie: the buffers of its first batch are not compressed."""
    arrow = _needed("pyarrow", "an Arrow shard")
    before = arrow.total_allocated_bytes()
    batch = next((batch for batch in table_batches(path) if batch.num_rows), None)
    return batch is None or int(arrow.total_allocated_bytes() - before) < max(4096, batch.nbytes // 16)


def row_checksum(row: Mapping[str, Any]) -> tuple[int, int]:
    """Return (bytes, CRC-32) of the names and values of a row: the same in whatever form of table it lies."""
    size, crc = 0, 0
    for name, value in row.items():
        content = value if isinstance(value, bytes) else json.dumps(value, default=_plain).encode()
        for part in (name.encode(), content):
            size, crc = size + len(part), zlib.crc32(part, crc)
    return size, crc


def _plain(value: object) -> str:
    """Times, decimals and bytes inside lists and structures."""
    return f"{len(value)} {zlib.crc32(value)}" if isinstance(value, bytes) else str(value)


class RowReader:
    """Reads rows of one Arrow file by number. Each process maps the file at its first read."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._process = 0
        self._batches: list[Any] = []
        self._ends = np.empty(0, np.int64)

    def read(self, number: int) -> dict[str, Any]:
        """Return row `number` as plain values. Raises ShardProblem when there are fewer."""
        if self._process != os.getpid():
            arrow = _needed("pyarrow", "a Parquet or Arrow shard")
            try:
                self._batches = list(_arrow_batches(arrow.memory_map(self.path)))
            except (arrow.ArrowInvalid, OSError) as problem:
                raise ShardProblem(f"shard `{self.path}` cannot be read: {problem}") from problem
            self._ends = np.cumsum([batch.num_rows for batch in self._batches])
            self._process = os.getpid()
        at = int(np.searchsorted(self._ends, number, "right"))
        if at == len(self._batches):
            raise ShardProblem(f"shard `{self.path}` ends before row {number}", "run `chronicle data verify`")
        batch = self._batches[at]
        row: dict[str, Any] = batch.slice(number - int(self._ends[at]) + batch.num_rows, 1).to_pylist()[0]
        return row

    def close(self) -> None:
        """Give the mapping back; a later read maps the file again."""
        self._batches, self._process = [], 0


# --- The cache


class ShardCache:
    """A directory of unpacked shards, by the sha256 of the packed ones. Several processes may use it at a time."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)

    def require_room(self, source: str, shards: Iterable[tuple[str, int]]) -> None:
        """Raise DataError where the shards (sha256, unpacked bytes) that are not there yet do not fit."""
        self.directory.mkdir(parents=True, exist_ok=True)
        wanted = sum(size for digest, size in shards if not (self.directory / digest).exists())
        free = shutil.disk_usage(self.directory).free
        if wanted > free:
            raise DataError(f"cache `{self.directory}` has room for {free:,} bytes, source `{source}` needs {wanted:,} more",
                            "name a directory on a larger disk, or unpack the shards where they lie")

    def path(self, location: str, form: str, digest: str) -> str:
        """Return the unpacked file of a packed shard; it is made if it is not there. Raises ShardProblem for a changed one."""
        path = self.directory / digest
        if not path.exists():
            self.directory.mkdir(parents=True, exist_ok=True)
            with open(self.directory / f"{digest}.lock", "wb") as lock:  # a killed process gives it back
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not path.exists():
                    self._unpack(location, form, digest, path)
        return str(path)

    def _unpack(self, location: str, form: str, digest: str, path: Path) -> None:
        begun = path.with_name(f"{path.name}.begun")
        try:
            with open_shard(location) as stream, open(begun, "wb") as target:
                watched = Watched(stream)
                if kind_of(form) == "rows" and form != ARROW:
                    watched.read_rest()
                    _write_table(table_batches(location), target)
                elif form == ARROW:
                    shutil.copyfileobj(watched, target, 1 << 20)
                else:
                    shutil.copyfileobj(unpacked(watched, form), target, 1 << 20)  # type: ignore[arg-type]
                    watched.read_rest()
                if watched.digest.hexdigest() != digest:
                    raise ShardProblem(f"shard `{location}` has changed: its sha256 is not the indexed {digest[:12]}…",
                                       "bring the indexed file back, or index the shards again: then the plan is another")
            begun.rename(path)
        except DAMAGED as problem:
            full = isinstance(problem, OSError) and problem.errno is not None
            reason = problem.strerror if isinstance(problem, OSError) and full else problem
            way_out = "see that the cache has room" if full else "`chronicle data verify` lists changed shards"
            raise ShardProblem(f"shard `{location}` cannot be unpacked into `{self.directory}`: {reason}", way_out) from problem
        finally:
            begun.unlink(missing_ok=True)


def _write_table(batches: Iterator[Any], target: IO[bytes]) -> None:
    """Write batches as an uncompressed IPC stream: the file form forbids dictionaries that change between batches."""
    writer = None
    for batch in batches:
        writer = writer or import_module("pyarrow.ipc").new_stream(target, batch.schema)
        writer.write_batch(batch)
    if writer is not None:
        writer.close()


class Watched:
    """A stream read once from front to back, with the count and the sha256 of all that was read."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self.digest, self.count = stream, hashlib.sha256(), 0

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes."""
        content = self._stream.read(size)
        self.digest.update(content)
        self.count += len(content)
        return content

    def read_rest(self) -> None:
        """Read to the end."""
        while self.read(1 << 20):
            pass

    def __iter__(self) -> Iterator[bytes]:
        for line in self._stream:
            self.digest.update(line)
            self.count += len(line)
            yield line


def _needed(package: str, what: str) -> Any:
    try:
        return import_module(package)
    except ImportError as problem:
        raise DataError(f"{what} needs the package {package}", f"pip install {package}") from problem

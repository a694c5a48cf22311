"""An index over shards as they are: any tar, JSON lines or text files, read in place and not copied.

    chronicle data index web=/shards/web code=/shards/code --out data      ->  data/web.index  data/code.index

A sample of a tar is what WebDataset calls one: neighbouring members with one name up to the first dot of the last part, one
field for each further extension. A sample of a `.jsonl` file is a line, of a `.txt` or `.md` file the file. The index holds
for each sample where it lies and a CRC-32 of those bytes, headers included, so a byte that changed is found when the sample
is first read; for each shard its size and sha256, which identify the data wherever it lies. Shards are only read.

An index is one file: a line of JSON, then two zlib-compressed columns (int64 sizes, uint32 checksums) of all samples.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from chronicle.data.shards import ShardProblem, ShardReader
from chronicle.errors import DataError
from rollback.disk.durable import write_atomic

SUFFIX = ".index"
INDEX_VERSION = 1
KINDS = {".tar": "tar", ".jsonl": "lines", ".txt": "file", ".md": "file"}
NOT_YET = {
    ".gz": "gzip has no random access: unpack it to `.tar` or `.jsonl`",
    ".tgz": "gzip has no random access: unpack it to `.tar`",
    ".zst": "a zstd stream has no random access: unpack it",
    ".parquet": "Parquet is not indexed yet: write it as `.jsonl` or `.tar`",
    ".arrow": "Arrow is not indexed yet: write it as `.jsonl` or `.tar`",
}
MOST_OPEN = 128  # shards at a time in a process: limits of 1,024 are usual, and there may be 10,000 shards
_BLOCK = 512
Sample = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedShard:
    """One file as it was indexed; `name` is its path below the indexed directory."""

    name: str
    kind: str
    size_bytes: int
    num_samples: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SourceIndex:
    """All samples of a source. `sizes` and `checksums` have one entry a sample, in the order of the shards.

    Samples lie one after the other in a shard from byte `firsts[shard]` on. `digest` identifies the content: it does not
    know where the shards lie, and the same shards under other names are the same data.
    """

    source: str
    root: str
    shards: tuple[IndexedShard, ...]
    sizes: NDArray[np.int64]
    checksums: NDArray[np.uint32]

    @property
    def num_samples(self) -> int:
        """How many samples there are."""
        return len(self.sizes)

    @property
    def digest(self) -> str:
        """Hex sha256 over kind and sha256 of the shards, in order."""
        parts = "\n".join(f"{shard.kind} {shard.sha256} {shard.num_samples}" for shard in self.shards)
        return hashlib.sha256(parts.encode()).hexdigest()


def index_source(source: str, directory: Path) -> SourceIndex:
    """Read every shard below a directory once. Raises DataError where there is none, ShardProblem for an unreadable one."""
    if not directory.is_dir():
        raise DataError(f"`{directory}` is no directory", "name the directory in which the shards lie")
    paths = sorted(path for path in directory.rglob("*") if path.is_file() and not path.name.startswith("."))
    for path in paths:
        if path.suffix in NOT_YET:
            raise DataError(f"`{path}` cannot be indexed: {NOT_YET[path.suffix]}", "or index a directory without it")
    shards, sizes, checksums = [], [], []
    for path in paths:
        if path.suffix in KINDS:
            shard, size, checksum = _read_shard(path, str(path.relative_to(directory)), KINDS[path.suffix])
            shards.append(shard)
            sizes.append(size)
            checksums.append(checksum)
    if not sum(shard.num_samples for shard in shards):
        raise DataError(f"`{directory}` holds no samples", f"expected files that end in {', '.join(KINDS)}")
    return SourceIndex(source=source, root=str(directory.absolute()), shards=tuple(shards), sizes=np.concatenate(sizes),
                       checksums=np.concatenate(checksums))


def write_source_index(index: SourceIndex, path: Path) -> None:
    """Write an index, atomically."""
    sizes, checksums = index.sizes.astype("<i8").tobytes(), index.checksums.astype("<u4").tobytes()
    columns = [zlib.compress(sizes, 6), zlib.compress(checksums, 1)]
    head = {"v": INDEX_VERSION, "source": index.source, "root": index.root, "digest": index.digest,
            "columns": [len(column) for column in columns],
            "shards": [[getattr(shard, name) for name in IndexedShard.__slots__] for shard in index.shards]}
    write_atomic(path, json.dumps(head, separators=(",", ":")).encode() + b"\n" + b"".join(columns), durable=False)


def read_source_index(path: str | Path) -> SourceIndex:
    """Read an index. Raises DataError where it is missing, damaged or of another version."""
    try:
        content = Path(path).read_bytes()
    except OSError as problem:
        reason = f"index `{path}` cannot be opened: {problem.strerror}"
        raise DataError(reason, "make it with `chronicle data index`") from problem
    line, _, body = content.partition(b"\n")
    try:
        head = json.loads(line)
        if head["v"] != INDEX_VERSION:
            reason = f"index `{path}` has version {head['v']}, this program reads {INDEX_VERSION}"
            raise DataError(reason, "index the shards again")
        first, second = head["columns"]
        index = SourceIndex(
            source=head["source"], root=head["root"],
            shards=tuple(IndexedShard(**dict(zip(IndexedShard.__slots__, row, strict=True))) for row in head["shards"]),
            sizes=np.frombuffer(zlib.decompress(body[:first]), "<i8"),
            checksums=np.frombuffer(zlib.decompress(body[first:first + second]), "<u4"))
        whole = len(index.sizes) == len(index.checksums) == sum(shard.num_samples for shard in index.shards)
        if not whole or index.digest != head["digest"]:
            raise ValueError("its parts do not belong together")
    except (ValueError, KeyError, TypeError, zlib.error) as problem:
        raise DataError(f"index `{path}` cannot be read: {problem}", "index the shards again") from problem
    return index


def verify_index(index: SourceIndex, root: Path | None = None) -> Iterator[str]:
    """Yield one sentence for each shard that is missing, truncated or changed, and for each that is not in the index."""
    place = Path(root or index.root)
    for shard in index.shards:
        path = place / shard.name
        problem = _differs(path, shard)
        if not problem and _sha256(path) != shard.sha256:
            problem = f"shard `{path}` has changed: its sha256 is not the indexed {shard.sha256[:12]}…"
        if problem:
            yield problem
    known = {shard.name for shard in index.shards}
    for path in sorted(place.rglob("*")) if place.is_dir() else ():
        if path.suffix in KINDS and path.is_file() and not path.name.startswith("."):
            name = str(path.relative_to(place))
            if name not in known:
                yield f"shard `{path}` is not in the index"


class SourceReader:
    """Reads samples by number, in any order and process. Raises ShardProblem at once for a shard of another size."""

    def __init__(self, index: SourceIndex, root: Path | str | None = None) -> None:
        self.index = index
        place = Path(root or index.root)
        for shard in index.shards:
            problem = _differs(place / shard.name, shard)
            if problem:
                raise ShardProblem(problem, "bring the indexed file back, or index the shards again: then the plan is another")
        self._place, self._open = place, dict[int, ShardReader]()  # the last one used is the last one in it
        counts = np.array([shard.num_samples for shard in index.shards], dtype=np.int64)
        self._samples_before = np.concatenate([[0], np.cumsum(counts)])
        ends = np.cumsum(index.sizes)
        before = np.concatenate([[0], ends])[self._samples_before[:-1]]  # bytes of all samples of earlier shards
        self._starts = ends - index.sizes - np.repeat(before, counts)

    def read(self, number: int) -> Sample:
        """Return sample `number`: `__key__`, `__source__`, and its fields as bytes. Raises ShardProblem for changed bytes."""
        shard = int(np.searchsorted(self._samples_before, number, "right")) - 1
        start, size = int(self._starts[number]), int(self.index.sizes[number])
        content, known = self._reader(shard).read(start, size), self.index.shards[shard]
        if zlib.crc32(content) != int(self.index.checksums[number]):
            raise ShardProblem(f"shard `{self._place / known.name}` has changed: bytes {start} to {start + size} (sample "
                               f"{number - int(self._samples_before[shard])}) are not what was indexed",
                               "`chronicle data verify` lists every changed shard; bring the indexed file back")
        name = known.name.rpartition(".")[0]
        if known.kind == "tar":
            sample = dict(_fields(content))
        elif known.kind == "lines":
            sample = {"__key__": f"{name}/{number - int(self._samples_before[shard])}", "json": content.strip()}
        else:
            sample = {"__key__": name, known.name.rpartition(".")[2]: content}
        return {**sample, "__source__": self.index.source}

    def _reader(self, shard: int) -> ShardReader:
        """Return the open shard; of many shards the one that was not used for longest is closed."""
        reader = self._open.pop(shard, None) or ShardReader(str(self._place / self.index.shards[shard].name))
        self._open[shard] = reader
        if len(self._open) > MOST_OPEN:
            self._open.pop(next(iter(self._open))).close()
        return reader


# --- One shard


def _read_shard(path: Path, name: str, kind: str) -> tuple[IndexedShard, NDArray[np.int64], NDArray[np.uint32]]:
    with open(path, "rb") as stream:
        watched = _Digest(stream)
        spans = {"tar": _tar_spans, "lines": _line_spans, "file": _file_span}[kind](watched, path)
        watched.read_rest()
        sizes, checksums = np.array([size for size, _ in spans], np.int64), np.array([crc for _, crc in spans], np.uint32)
        return IndexedShard(name=name, kind=kind, size_bytes=watched.count, num_samples=len(spans),
                            sha256=watched.digest.hexdigest()), sizes, checksums


class _Digest:
    """A stream read once from front to back, with the sha256 of all that was read."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self.digest, self.count = stream, hashlib.sha256(), 0

    def read(self, size: int) -> bytes:
        content = self._stream.read(size)
        self.digest.update(content)
        self.count += len(content)
        return content

    def read_rest(self) -> None:
        while self.read(1 << 20):
            pass

    def __iter__(self) -> Iterator[bytes]:
        for line in self._stream:
            self.digest.update(line)
            self.count += len(line)
            yield line


def _tar_spans(stream: _Digest, path: Path) -> list[tuple[int, int]]:
    """Return (bytes, CRC) of each sample; what lies before its first member (directories, headers of paths) belongs to it."""
    spans: list[tuple[int, int]] = []
    size, crc, key = 0, 0, None
    for member, span in _members(stream, path):
        if member is not None:
            mine = _key(member)
            if key is not None and mine != key:
                spans.append((size, crc))
                size, crc = 0, 0
            key = mine
        size, crc = size + len(span), zlib.crc32(span, crc)
    return [*spans, (size, crc)] if key is not None else spans


def _members(stream: _Digest, path: Path) -> Iterator[tuple[str | None, bytes]]:
    """Yield (name, bytes from first header to padding) of each regular file of a tar; the name is None for other members."""
    pending = b""
    extended: dict[str, str] = {}
    while True:
        head = stream.read(_BLOCK)
        if len(head) < _BLOCK:
            raise ShardProblem(f"shard `{path}` is truncated: it ends at byte {stream.count} without the zero blocks that "
                               "end a tar", "copy it again, or leave it out")
        if not head.strip(b"\0"):
            if pending:
                raise ShardProblem(f"shard `{path}` ends after the header of a long name", "copy it again")
            return
        try:
            info = tarfile.TarInfo.frombuf(head, "utf-8", "surrogateescape")
        except tarfile.TarError as problem:
            raise ShardProblem(f"shard `{path}` cannot be read as a tar at byte {stream.count - _BLOCK}: {problem}",
                               "build or copy it again") from problem
        size = int(extended.get("size", info.size)) if info.isreg() else info.size
        padded = -(-size // _BLOCK) * _BLOCK
        body = stream.read(padded)
        if len(body) < padded:
            raise ShardProblem(f"shard `{path}` is truncated: it ends at byte {stream.count} inside `{info.name}`",
                               "copy it again, or leave it out")
        pending += head + body
        if info.type in (tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME):
            extended |= _pax(body[:size]) if info.type == tarfile.XHDTYPE else {"path": _text(body)}
        elif info.isreg():
            yield extended.get("path", info.name), pending
            pending, extended = b"", {}
        elif info.type != tarfile.GNUTYPE_LONGLINK:
            yield None, pending
            pending, extended = b"", {}


def _pax(body: bytes) -> dict[str, str]:
    """Return the records of a pax header: `<length> <name>=<value>\\n` each (pax(1))."""
    found, rest = {}, body
    while rest:
        length = int(rest.partition(b" ")[0])
        name, _, value = rest[:length].partition(b" ")[2].rstrip(b"\n").partition(b"=")
        found[name.decode()] = value.decode("utf-8", "surrogateescape")
        rest = rest[length:]
    return found


def _text(body: bytes) -> str:
    return body.rstrip(b"\0").decode("utf-8", "surrogateescape")


def _key(name: str) -> str:
    folder, slash, last = name.rpartition("/")
    return folder + slash + last.partition(".")[0]


def _fields(content: bytes) -> Iterator[tuple[str, Any]]:
    """Yield `__key__` and the fields of one sample of a tar."""
    with tarfile.open(fileobj=io.BytesIO(content + bytes(2 * _BLOCK)), mode="r:") as tar:
        for member in tar:
            if member.isreg():
                yield "__key__", _key(member.name)
                field = member.name.rpartition("/")[2].partition(".")[2]
                yield field, content[member.offset_data:member.offset_data + member.size]


def _line_spans(stream: _Digest, path: Path) -> list[tuple[int, int]]:
    """Return (bytes, CRC) of each line; empty lines belong to the line before, at the beginning to the one after."""
    spans: list[tuple[int, int]] = []
    size, crc, filled = 0, 0, False
    for line in stream:
        if line.strip():
            if filled:
                spans.append((size, crc))
                size, crc = 0, 0
            filled = True
        size, crc = size + len(line), zlib.crc32(line, crc)
    return [*spans, (size, crc)] if filled else spans


def _file_span(stream: _Digest, path: Path) -> list[tuple[int, int]]:
    content = stream.read(-1)
    return [(len(content), zlib.crc32(content))] if content else []


def _differs(path: Path, shard: IndexedShard) -> str:
    """Return why a file cannot be the indexed shard, by its size alone; "" for no reason."""
    try:
        size = os.stat(path).st_size
    except OSError as problem:
        return f"shard `{path}` cannot be found: {problem.strerror}"
    if size == shard.size_bytes:
        return ""
    how = "is truncated" if size < shard.size_bytes else "has changed"
    return f"shard `{path}` {how}: {size:,} bytes, indexed with {shard.size_bytes:,}"


def _sha256(path: Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def describe_index(index: SourceIndex) -> str:
    """Return one line: samples, shards, bytes, digest."""
    size = sum(shard.size_bytes for shard in index.shards)
    return (f"{index.source}: {index.num_samples:,} samples in {len(index.shards):,} shards, {size:,} bytes, "
            f"sha256 {index.digest[:12]}")


def named_directories(words: Iterable[str]) -> Mapping[str, Path]:
    """Return name → directory of `NAME=DIR` or `DIR`. Raises DataError for two of one name."""
    found: dict[str, Path] = {}
    for word in words:
        name, equals, place = word.partition("=")
        directory = Path(place if equals else word).expanduser()
        name = name if equals else directory.absolute().name
        if name in found or not name or "/" in name:
            raise DataError(f"`{word}` gives no name of its own to a source", "write NAME=DIR, each name once")
        found[name] = directory
    return found

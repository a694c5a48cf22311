"""An index over shards as they are: tars, JSON lines and texts, on this machine or remote, read and not copied.

    chronicle data index web=/shards/web code=/shards/code --out data      ->  data/web.index  data/code.index

A sample is bytes from a place to a place. Of a tar it is what WebDataset calls one: neighbouring members with one name up to
the first dot of the last part, one field for each further extension. Of a `.jsonl` file it is a line, of a `.txt` or `.md` file
the file. The index holds for each sample where it ends and a CRC-32 of its bytes, headers included, so a byte that changed is
found when the sample is first read; for each shard its size and sha256, which identify the data wherever it lies. Shards are
only read. What is compressed or lies in columns is unpacked once by its own tool, or read by its own library (`Rows`).
An index is one file: a line of JSON, then two zlib-compressed columns (int64 sizes, uint32 checksums) of all samples.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import sys
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chronicle.credentials import redact
from chronicle.data.shards import (
    BLOCK,
    ShardProblem,
    ShardReader,
    is_remote,
    open_shard,
    remote_files,
    scan_tar,
    sha256_of,
    shard_bytes,
    shard_location,
)
from chronicle.errors import DataError
from rollback.disk.durable import write_atomic

KINDS = {".tar": "tar", ".jsonl": "lines", ".ndjson": "lines", ".txt": "file", ".md": "file"}
SUFFIX = ".index"
INDEX_VERSION = 1
MOST_OPEN = 128  # shards at a time in a process: limits of 1,024 are usual, and there may be 10,000 shards
_ABOUT = re.compile(r"(readme|licen[cs]e|notice|changelog|checksums?|(md5|sha\d+)sums?)\b", re.IGNORECASE)
_USER = re.compile(r"https?://[^/]*@")
Sample = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedShard:
    """One file as it was indexed; `name` is its path below the indexed directory, `kind` one of `KINDS`."""

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


def index_source(source: str, place: str | Path) -> SourceIndex:
    """Read every shard below a directory or URL once. Raises DataError for none, ShardProblem for one that cannot be read.

    A URL that holds a password, key or signature is refused: it would stand in the index.
    """
    if is_remote(str(place)) and (redact(str(place)) != str(place) or _USER.match(str(place)) or "?" in str(place)):
        raise DataError(f"`{_USER.sub('http…://***@', redact(str(place)))}` is not the URL of a directory alone: it names a "
                        "user, a key or a query", "credentials belong where the store's package finds them (AWS_ACCESS_KEY_ID, "
                        "~/.aws, GOOGLE_APPLICATION_CREDENTIALS): an index keeps none")
    shards, sizes, checksums = [], [], []
    names, others = list_shards(place)
    for name in names:
        shard, size, checksum = _read_shard(shard_location(str(place), name), name)
        shards.append(shard)
        sizes.append(size)
        checksums.append(checksum)
    if not sum(shard.num_samples for shard in shards):
        lie = f", but {len(others):,} files such as `{others[0]}`" if others else ""
        raise DataError(f"`{place}` holds no samples{lie}",
                        f"expected files that end in {', '.join(KINDS)}; unpack what is compressed, and give tables as `Rows`")
    root = str(place) if is_remote(str(place)) else str(Path(place).absolute())
    return SourceIndex(source=source, root=root, shards=tuple(shards), sizes=np.concatenate(sizes),
                       checksums=np.concatenate(checksums))


def list_shards(place: str | Path) -> tuple[list[str], list[str]]:
    """Return the names of the shards below a place, sorted, and of the files that are none.

    Hidden files are neither. What has a tar's name up to the suffix (img2dataset's `00000.txt` beside `00000.tar`) tells of
    that tar, and a README beside shards of all. Raises DataError for no directory.
    """
    found = [*remote_files(str(place))] if is_remote(str(place)) else _local_files(Path(place))
    kinds = {name: KINDS.get(os.path.splitext(name)[1], "") for name in found}
    tars = {os.path.splitext(name)[0] for name, kind in kinds.items() if kind == "tar"}
    several = tars or "lines" in kinds.values()
    shards, others = list[str](), list[str]()
    for name in sorted(found, key=lambda one: one.split("/")):
        kind, last = kinds[name], name.rpartition("/")[2]
        if last.startswith("."):
            continue
        about = kind == "file" and several and _ABOUT.match(last)
        of_a_tar = kind != "tar" and os.path.splitext(name)[0] in tars
        (shards if kind and not about and not of_a_tar else others).append(name)
    return shards, others


def _local_files(place: Path) -> list[str]:
    if not place.is_dir():
        raise DataError(f"`{place}` is no directory", "name the directory in which the shards lie")
    return [str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()]


def write_source_index(index: SourceIndex, path: Path) -> None:
    """Write an index, atomically."""
    sizes, checksums = index.sizes.astype("<i8").tobytes(), index.checksums.astype("<u4").tobytes()
    columns = [zlib.compress(sizes, 6), zlib.compress(checksums, 1)]
    head = {"v": INDEX_VERSION, "source": index.source, "root": index.root, "digest": index.digest,
            "columns": [len(column) for column in columns],
            "shards": [astuple(shard) for shard in index.shards]}
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
        unknown = sorted({row[1] for row in head["shards"]} - set(KINDS.values()))
        if unknown:
            raise DataError(f"index `{path}` has shards of form `{unknown[0]}`, which this program does not read",
                            "index the shards again")
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


def verify_index(index: SourceIndex, root: str | Path | None = None) -> Iterator[str]:
    """Yield one sentence for each shard that is missing, truncated or changed, and for each that is not in the index."""
    place = str(root or index.root)
    sizes = _sizes(place, index)
    for shard in index.shards:
        path = shard_location(place, shard.name)
        problem = _differs(path, shard, sizes)
        if not problem and sha256_of(path) != shard.sha256:
            problem = f"shard `{path}` has changed: its sha256 is not the indexed {shard.sha256[:12]}…"
        if problem:
            yield redact(problem)
    known = {shard.name for shard in index.shards}
    if is_remote(place) or Path(place).is_dir():
        for name in list_shards(place)[0]:
            if name not in known:
                yield f"shard `{redact(shard_location(place, name))}` is not in the index"


class SourceReader:
    """Reads samples by number, in any order and process. Raises ShardProblem at once for a shard of another size."""

    def __init__(self, index: SourceIndex, root: Path | str | None = None) -> None:
        self.index = index
        self._place = str(root or index.root)
        sizes = _sizes(self._place, index)
        for shard in index.shards:
            problem = _differs(shard_location(self._place, shard.name), shard, sizes)
            if problem:
                raise ShardProblem(problem, "bring the indexed file back, or index the shards again: then the plan is another")
        self._open = dict[int, ShardReader]()  # the last one used is the last one in it
        counts = np.array([shard.num_samples for shard in index.shards], dtype=np.int64)
        self._samples_before = np.concatenate([[0], np.cumsum(counts)])
        ends = np.cumsum(index.sizes)
        before = np.concatenate([[0], ends])[self._samples_before]  # bytes of all samples of earlier shards
        self._starts = ends - index.sizes - np.repeat(before[:-1], counts)

    def read(self, number: int) -> Sample:
        """Return sample `number`: `__key__`, `__source__`, and its fields as bytes. Raises ShardProblem for changed bytes."""
        shard = int(np.searchsorted(self._samples_before, number, "right")) - 1
        known, within = self.index.shards[shard], number - int(self._samples_before[shard])
        start, size = int(self._starts[number]), int(self.index.sizes[number])
        content = self._reader(shard).read(start, size)
        if zlib.crc32(content) != int(self.index.checksums[number]):
            path = shard_location(self._place, known.name)
            raise ShardProblem(f"shard `{path}` has changed: bytes {start} to {start + size} (sample {within}) are not what "
                               "was indexed",
                               "`chronicle data verify` lists every changed shard; bring the indexed file back")
        name, suffix = os.path.splitext(known.name)
        if known.kind == "tar":
            sample = dict(_fields(content))
        elif known.kind == "lines":
            sample = {"__key__": f"{name}/{within}", "json": content.strip()}
        else:
            sample = {"__key__": name, suffix[1:]: content}
        return {**sample, "__source__": self.index.source}

    def _reader(self, shard: int) -> ShardReader:
        """Return the open shard; of many shards the one that was not used for longest is closed."""
        path = shard_location(self._place, self.index.shards[shard].name)
        reader = self._open.pop(shard, None) or ShardReader(path)
        self._open[shard] = reader
        if len(self._open) > MOST_OPEN:
            self._open.pop(next(iter(self._open))).close()
        return reader


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A source that another library reads: `rows[n]` is a dict of fields (a dataset of Hugging Face, a list).

    `digest` identifies the content: a plan with another one is refused. Nothing else tells that rows have changed.
    """

    source: str
    rows: Any
    digest: str

    @property
    def num_samples(self) -> int:
        """How many rows there are."""
        return len(self.rows)

    def read(self, number: int) -> Sample:
        """Return row `number` with `__key__` and `__source__`."""
        return {"__key__": f"{self.source}/{number}", **self.rows[number], "__source__": self.source}


# --- One shard


def _read_shard(path: str, name: str) -> tuple[IndexedShard, NDArray[np.int64], NDArray[np.uint32]]:
    """Read a shard once for the places where its samples end, and once for the checksums of what lies between."""
    kind = KINDS[os.path.splitext(name)[1]]
    ends = {"tar": _ends_in_tar, "lines": _ends_of_lines, "file": _end_of_file}[kind](path)
    digest, checksums, count = hashlib.sha256(), list[int](), 0
    with open_shard(path) as stream:
        for end in ends:
            content = stream.read(end - count)
            digest.update(content)
            checksums.append(zlib.crc32(content))
            count += len(content)
        while block := stream.read(1 << 20):
            if kind == "tar" and block.strip(b"\0"):
                end = ends[-1] + BLOCK if ends else BLOCK
                raise ShardProblem(f"shard `{path}` goes on after its end at byte {end}: no reader finds what lies behind it",
                                   "keep the parts as files of their own, or join them by `tar --concatenate`")
            digest.update(block)
            count += len(block)
    sizes = np.array([end - begin for begin, end in pairwise([0, *ends])], np.int64)
    shard = IndexedShard(name=name, kind=kind, size_bytes=count, num_samples=len(ends), sha256=digest.hexdigest())
    return shard, sizes, np.array(checksums, np.uint32)


def _ends_in_tar(path: str) -> list[int]:
    """Return where each sample ends; what lies before its first member (directories, headers of paths) belongs to it."""
    ends: list[int] = []
    keys, fields, torn, twice, links = set[str](), set[str](), list[str](), list[str](), list[str]()
    key = None
    members, end = scan_tar(path)
    for member in members:
        if member.issparse():
            raise ShardProblem(f"shard `{path}` holds the sparse file `{member.name}`: its bytes do not lie there as they are",
                               "write the tar again without `-S` (`--sparse`)")
        links += [member.name] if member.islnk() else []
        if not member.isreg():
            continue
        mine = _key(member.name)
        if mine != key:
            ends += [] if key is None else [member.offset]
            torn += [mine] if mine in keys else []
            keys.add(mine)
            fields.clear()
        twice += [member.name] if member.name in fields else []
        fields.add(member.name)
        key = mine
    told = {
        "samples lie in several places, each of which is taken for one (`tar --sort=name` keeps them together)": torn,
        "members have one name in one sample: the last one is read": twice,
        "hard links are left out, as WebDataset does": links,
    }
    for what, found in told.items():
        if found:
            print(f"chronicle: shard `{redact(path)}`: {len(found):,} {what}, such as `{found[0]}`", file=sys.stderr)
    return [*ends, end] if key is not None else []


def _ends_of_lines(path: str) -> list[int]:
    """Return where each line ends; empty lines belong to the line before, at the beginning to the one after."""
    ends, at, filled = list[int](), 0, False
    with open_shard(path) as stream:
        for line in stream:
            if line.strip():
                ends += [at] if filled else []
                filled = True
            at += len(line)
    return [*ends, at] if filled else []


def _end_of_file(path: str) -> list[int]:
    size = shard_bytes(path)
    return [size] if size else []


def _key(name: str) -> str:
    folder, slash, last = name.rpartition("/")
    return folder + slash + last.partition(".")[0]


def _fields(content: bytes) -> Iterator[tuple[str, Any]]:
    """Yield `__key__` and the fields of one sample of a tar."""
    with tarfile.open(fileobj=io.BytesIO(content + bytes(2 * BLOCK)), mode="r:") as tar:
        for member in tar:
            if member.isreg():
                yield "__key__", _key(member.name)
                field = member.name.rpartition("/")[2].partition(".")[2]
                yield field, content[member.offset_data:member.offset_data + member.size]


def _sizes(place: str, index: SourceIndex) -> dict[str, int | None]:
    """Return the bytes of the indexed shards that are there; None for unknown."""
    if is_remote(place):
        return remote_files(place)
    found: dict[str, int | None] = {}
    for shard in index.shards:
        with suppress(OSError):
            found[shard.name] = os.stat(shard_location(place, shard.name)).st_size
    return found


def _differs(path: str, shard: IndexedShard, sizes: Mapping[str, int | None]) -> str:
    """Return why a file cannot be the indexed shard, by its size alone; "" for no reason."""
    if shard.name not in sizes:
        return f"shard `{path}` cannot be found"
    size = sizes[shard.name]
    if size is None or size == shard.size_bytes:
        return ""
    how = "is truncated" if size < shard.size_bytes else "has changed"
    return f"shard `{path}` {how}: {size:,} bytes, indexed with {shard.size_bytes:,}"


def describe_index(index: SourceIndex) -> str:
    """Return one line: samples, shards, bytes, digest."""
    size = sum(shard.size_bytes for shard in index.shards)
    return (f"{index.source}: {index.num_samples:,} samples in {len(index.shards):,} shards, {size:,} bytes, "
            f"sha256 {index.digest[:12]}")


def named_directories(words: Iterable[str]) -> Mapping[str, str]:
    """Return name → directory or URL of `NAME=DIR` or `DIR`. Raises DataError for two of one name."""
    found: dict[str, str] = {}
    for word in words:
        name, equals, place = word.partition("=")
        if not equals or "://" in name:
            name, place = "", word
        place = place.rstrip("/") if is_remote(place) else str(Path(place).expanduser())
        name = name or (place.rpartition("/")[2] if is_remote(place) else Path(place).absolute().name)
        if name in found or not name or "/" in name:
            raise DataError(f"`{redact(word)}` gives no name of its own to a source", "write NAME=DIR, each name once")
        found[name] = place
    return found

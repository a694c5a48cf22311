"""An index over shards as they are: tars, JSON lines, texts and tables, on this machine or remote, read and not copied.

    chronicle data index web=/shards/web code=/shards/code --out data      ->  data/web.index  data/code.index

A sample of a tar is what WebDataset calls one: neighbouring members with one name up to the first dot of the last part, one
field for each further extension. A sample of a `.jsonl` file is a line, of a `.txt` or `.md` file the file, of a Parquet or
Arrow file a row. The index holds for each sample where it lies and a CRC-32 of those bytes, headers included, or of the row's
names and values, so a byte that changed is found when the sample is first read; for each shard its size and sha256, which
identify the data wherever it lies. Shards are only read. `shard_forms` says which of them need a cache.

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
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chronicle.credentials import redact
from chronicle.data.shard_forms import (
    ARROW,
    ARROW_PACKED,
    DAMAGED,
    KINDS,
    PACKINGS,
    RowReader,
    ShardCache,
    Watched,
    is_mapped,
    is_packed,
    kind_of,
    row_checksum,
    shard_form,
    table_batches,
    unpacked,
)
from chronicle.data.shards import ShardProblem, ShardReader, is_remote, open_shard, remote_files, shard_location
from chronicle.errors import DataError
from rollback.disk.durable import write_atomic

SUFFIX = ".index"
INDEX_VERSION = 1
MOST_OPEN = 128  # shards at a time in a process: limits of 1,024 are usual, and there may be 10,000 shards
_BLOCK = 512
_ABOUT = re.compile(r"(readme|licen[cs]e|notice|changelog|checksums?|(md5|sha\d+)sums?)\b", re.IGNORECASE)
_USER = re.compile(r"https?://[^/]*@")
Sample = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedShard:
    """One file as it was indexed; `name` is its path below the indexed directory, `kind` its form (`shard_forms`)."""

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
                        f"expected files that end in {', '.join(KINDS)}, or streams of them in {', '.join(PACKINGS)}")
    root = str(place) if is_remote(str(place)) else str(Path(place).absolute())
    return SourceIndex(source=source, root=root, shards=tuple(shards), sizes=np.concatenate(sizes),
                       checksums=np.concatenate(checksums))


def list_shards(place: str | Path) -> tuple[list[str], list[str]]:
    """Return the names of the shards below a place, sorted, and of the files that are none.

    Hidden files are neither, nor are indexes beside tars. Of a directory with the `state.json` of Hugging Face's `datasets`
    only the Arrow files that it lists count: others are caches of `map`, with the same rows. What has a tar's name up to the
    suffix (img2dataset's `00000.parquet` beside `00000.tar`) tells of that tar, and a README beside shards of all.
    Raises DataError for no directory, and for one of several splits.
    """
    found = [*remote_files(str(place))] if is_remote(str(place)) else _local_files(Path(place))
    state = {folder for folder, _, last in (name.rpartition("/") for name in found) if last == "state.json"}
    splits = sorted(folder for folder in state if folder) if "dataset_dict.json" in found else []
    if splits:
        raise DataError(f"`{redact(str(place))}` holds {len(splits)} splits: {', '.join(splits[:6])}",
                        f"name one of them, such as {redact(shard_location(str(place), splits[-1]))}")
    tars = {_without_suffix(name) for name in found if kind_of(shard_form(name)) == "tar"}
    several = tars or any(kind_of(shard_form(name)) in ("lines", "rows") for name in found)
    listed = {folder: _listed(shard_location(str(place), f"{folder}/state.json".lstrip("/"))) for folder in state}
    shards, others = list[str](), list[str]()
    for name in sorted(found, key=lambda one: one.split("/")):
        folder, _, last = name.rpartition("/")
        if last.startswith(".") or last.endswith(".tar.idx"):
            continue
        cache = folder in listed and listed[folder] and last.endswith(".arrow") and last not in listed[folder]
        kind = kind_of(shard_form(last))
        beside = (kind == "file" and several and _ABOUT.match(last)) or (kind != "tar" and _without_suffix(name) in tars)
        if kind and not cache and not beside:
            shards.append(name)
        else:
            others.append(name)
    return shards, others


def _local_files(place: Path) -> list[str]:
    if not place.is_dir():
        raise DataError(f"`{place}` is no directory", "name the directory in which the shards lie")
    return [str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()]


def _listed(path: str) -> set[str]:
    """The data files that the `state.json` of a saved dataset names; none where it is something else."""
    with open_shard(path) as stream:
        try:
            return {one["filename"] for one in json.loads(stream.read())["_data_files"]}
        except (ValueError, KeyError, TypeError):
            return set()


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
        unknown = sorted({row[1] for row in head["shards"]} - {shard_form(f"x{suffix}{packing}") for suffix in (*KINDS, ".json")
                                                             for packing in ("", *PACKINGS)} - {ARROW_PACKED})
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
        if not problem and _sha256(path) != shard.sha256:
            problem = f"shard `{path}` has changed: its sha256 is not the indexed {shard.sha256[:12]}…"
        if problem:
            yield redact(problem)
    known = {shard.name for shard in index.shards}
    if is_remote(place) or Path(place).is_dir():
        for name in list_shards(place)[0]:
            if name not in known:
                yield f"shard `{redact(shard_location(place, name))}` is not in the index"


class SourceReader:
    """Reads samples by number, in any order and process. Raises ShardProblem at once for a shard of another size.

    `cache` is the directory for packed shards; DataError where there are such and no cache, or no room in it.
    """

    def __init__(self, index: SourceIndex, root: Path | str | None = None, cache: Path | str | None = None) -> None:
        self.index = index
        self._place = str(root or index.root)
        sizes = _sizes(self._place, index)
        for shard in index.shards:
            problem = _differs(shard_location(self._place, shard.name), shard, sizes)
            if problem:
                raise ShardProblem(problem, "bring the indexed file back, or index the shards again: then the plan is another")
        self._open = dict[int, ShardReader | RowReader]()  # the last one used is the last one in it
        counts = np.array([shard.num_samples for shard in index.shards], dtype=np.int64)
        self._samples_before = np.concatenate([[0], np.cumsum(counts)])
        ends = np.cumsum(index.sizes)
        before = np.concatenate([[0], ends])[self._samples_before]  # bytes of all samples of earlier shards
        self._starts = ends - index.sizes - np.repeat(before[:-1], counts)
        self._cache = None if cache is None else ShardCache(cache)
        remote = is_remote(self._place)
        self._packed = {number: int(before[number + 1] - before[number]) for number, shard in enumerate(index.shards)
                        if is_packed(shard.kind, remote=remote)}
        if self._packed:
            self._require_cache()

    def _require_cache(self) -> None:
        if self._cache is None:
            forms = sorted({self.index.shards[number].kind.partition(".")[2] for number in self._packed})
            raise DataError(f"source `{self.index.source}` has {len(self._packed):,} shards that cannot be entered at a sample "
                            f"({', '.join(forms)}), {sum(self._packed.values()):,} bytes unpacked",
                            "give a directory with so much room as `cache`: each is unpacked there once, when first read")
        self._cache.require_room(self.index.source, ((self.index.shards[number].sha256, size) for number, size in
                                                     self._packed.items()))

    def read(self, number: int) -> Sample:
        """Return sample `number`: `__key__`, `__source__`, and its fields: bytes, of a table plain values.

        Raises ShardProblem for changed bytes.
        """
        shard = int(np.searchsorted(self._samples_before, number, "right")) - 1
        known, within = self.index.shards[shard], number - int(self._samples_before[shard])
        kind, reader, sample = kind_of(known.kind), self._reader(shard), Sample()
        start, size = int(self._starts[number]), int(self.index.sizes[number])
        content = b""
        if isinstance(reader, RowReader):
            sample = reader.read(within)
            same = row_checksum(sample) == (size, int(self.index.checksums[number]))
        else:
            content = reader.read(start, size)
            same = zlib.crc32(content) == int(self.index.checksums[number])
        if not same:
            where = f"row {within}" if kind == "rows" else f"bytes {start} to {start + size} (sample {within})"
            where += f" of `{reader.path}`, which it was unpacked into," if shard in self._packed else ""
            raise ShardProblem(f"shard `{shard_location(self._place, known.name)}` has changed: {where} "
                               f"{'is' if kind == 'rows' else 'are'} not what was indexed",
                               "`chronicle data verify` lists every changed shard; bring the indexed file back"
                               + (", or remove the unpacked one" if shard in self._packed else ""))
        name = _without_suffix(known.name)
        if kind == "tar":
            sample = dict(_fields(content))
        elif kind == "lines":
            sample = {"__key__": f"{name}/{within}", "json": content.strip()}
        elif kind == "file":
            sample = {"__key__": name, known.name[len(name) + 1:].partition(".")[0]: content}
        else:
            sample = {"__key__": f"{name}/{within}", **sample}
        return {**sample, "__source__": self.index.source}

    def _reader(self, shard: int) -> ShardReader | RowReader:
        """Return the open shard; of many shards the one that was not used for longest is closed."""
        reader = self._open.pop(shard, None) or self._opened(shard)
        self._open[shard] = reader
        if len(self._open) > MOST_OPEN:
            self._open.pop(next(iter(self._open))).close()
        return reader

    def _opened(self, shard: int) -> ShardReader | RowReader:
        known = self.index.shards[shard]
        path = shard_location(self._place, known.name)
        if shard in self._packed and self._cache is not None:
            path = self._cache.path(path, known.kind, known.sha256)
        return RowReader(path) if kind_of(known.kind) == "rows" else ShardReader(path)


# --- One shard


def _read_shard(path: str, name: str) -> tuple[IndexedShard, NDArray[np.int64], NDArray[np.uint32]]:
    form = shard_form(name)
    with open_shard(path) as stream:
        watched = Watched(stream)
        try:
            if kind_of(form) == "rows":
                spans = [row_checksum(row) for batch in table_batches(path) for row in batch.to_pylist()]
                form = form if form != ARROW or is_mapped(path) else ARROW_PACKED
            else:
                inner = Watched(unpacked(watched, form)) if is_packed(form) else watched  # type: ignore[arg-type]
                spans = {"tar": _tar_spans, "lines": _line_spans, "file": _file_span}[kind_of(form)](inner, path)
                inner.read_rest()
            watched.read_rest()
        except DAMAGED as problem:
            raise ShardProblem(f"shard `{path}` is cut or damaged: {problem}", "copy it again, or leave it out") from problem
    sizes, checksums = np.array([size for size, _ in spans], np.int64), np.array([crc for _, crc in spans], np.uint32)
    return IndexedShard(name=name, kind=form, size_bytes=watched.count, num_samples=len(spans),
                        sha256=watched.digest.hexdigest()), sizes, checksums


def _tar_spans(stream: Watched, path: str) -> list[tuple[int, int]]:
    """Return (bytes, CRC) of each sample; what lies before its first member (directories, headers of paths) belongs to it."""
    spans: list[tuple[int, int]] = []
    size, crc, key = 0, 0, None
    keys, fields, torn, twice = set[str](), set[str](), list[str](), list[str]()
    for member, span in _members(stream, path):
        if member is not None:
            mine = _key(member)
            if key is not None and mine != key:
                spans.append((size, crc))
                size, crc = 0, 0
            if mine != key:
                torn += [mine] if mine in keys else []
                keys.add(mine)
                fields.clear()
            twice += [member] if member in fields else []
            fields.add(member)
            key = mine
        size, crc = size + len(span), zlib.crc32(span, crc)
    for found, what in ((torn, "samples lie in several places, each of which is taken for one (`tar --sort=name` keeps them "
                               "together)"), (twice, "members have one name in one sample: the last one is read")):
        if found:
            print(f"chronicle: shard `{redact(path)}`: {len(found):,} {what}, such as `{found[0]}`", file=sys.stderr)
    return [*spans, (size, crc)] if key is not None else spans


def _members(stream: Watched, path: str) -> Iterator[tuple[str | None, bytes]]:
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
            _require_end(stream, path)
            return
        try:
            info = tarfile.TarInfo.frombuf(head, "utf-8", "surrogateescape")
        except tarfile.TarError as problem:
            raise ShardProblem(f"shard `{path}` cannot be read as a tar at byte {stream.count - _BLOCK}: {problem}",
                               "build or copy it again") from problem
        if info.type == tarfile.GNUTYPE_SPARSE or any(name.startswith("GNU.sparse.") for name in extended):
            name = extended.get("GNU.sparse.name", info.name)
            raise ShardProblem(f"shard `{path}` holds the sparse file `{name}`, whose bytes do not lie there as they are",
                               "write the tar again without `-S` (`--sparse`)")
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
            if info.islnk():
                print(f"chronicle: shard `{redact(path)}`: the hard link `{extended.get('path', info.name)}` is left out, as "
                      "WebDataset does", file=sys.stderr)
            yield None, pending
            pending, extended = b"", {}


def _require_end(stream: Watched, path: str) -> None:
    """Raise ShardProblem where more than zeros follows the end of a tar: readers stop there, so samples would be lost."""
    end = stream.count
    while block := stream.read(1 << 20):
        if block.strip(b"\0"):
            raise ShardProblem(f"shard `{path}` goes on after its end at byte {end}: no reader finds what lies behind it",
                               "keep the parts as files of their own, or join them by `tar --concatenate`")


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


def _line_spans(stream: Watched, path: str) -> list[tuple[int, int]]:
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


def _file_span(stream: Watched, path: str) -> list[tuple[int, int]]:
    content = stream.read(-1)
    return [(len(content), zlib.crc32(content))] if content else []


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


def _sha256(path: str) -> str:
    with open_shard(path) as stream:
        watched = Watched(stream)
        watched.read_rest()
        return watched.digest.hexdigest()


def _without_suffix(name: str) -> str:
    """The name of a shard without the suffixes of its form."""
    stem, suffix = os.path.splitext(name)
    return os.path.splitext(stem)[0] if suffix in PACKINGS else stem


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

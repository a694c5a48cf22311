"""A built source on disk: WebDataset tar shards of text, their offset indexes, and a manifest that lists them all.

    <directory>/<source>/train-000000.tar  train-000000.tar.idx  …  held_out-000000.tar  …  manifest.json

Each member `<key>.txt` is a stretch of UTF-8 text; stock WebDataset reads the same files. Equal text gives tars with equal
bytes (no times, no owners), so their digests identify the data. `<shard>.tar.idx` holds one JSON line (version, count,
size of the tar) and then little-endian int64 rows (offset, size, key hash) of every regular member. A tar that ends inside
a member, or without its two closing zero blocks, is truncated. Files are local or, through fsspec, remote.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from chronicle.credentials import redact
from chronicle.data.repeats import without_repeats
from chronicle.errors import DataError
from rollback.disk.durable import write_atomic

INDEX_VERSION = 1
_BLOCK = 512


class ShardProblem(DataError):
    """A shard is missing, truncated, or differs from its index or manifest; the message names the file, never a password."""

    def __init__(self, message: str, remedy: str | None = None) -> None:
        super().__init__(redact(message), remedy)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardIndex:
    """Positions of the samples of a shard. `rows` is (n, 3): offset, size, key hash."""

    tar_bytes: int
    rows: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.rows)


def key_hash(key: str) -> int:
    """Return a 63-bit hash of a key, equal on every machine."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") >> 1


def index_path(shard: str) -> str:
    """Return the path of a shard's index, beside the shard."""
    return f"{shard}.idx"


def scan_tar(shard: str) -> ShardIndex:
    """Read the headers of a tar. Raises ShardProblem when it is missing, truncated or not a tar."""
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
    """Write the index beside a local shard, atomically."""
    head = {"v": INDEX_VERSION, "count": len(index), "tar_bytes": index.tar_bytes}
    target = Path(index_path(shard))
    write_atomic(target, json.dumps(head).encode() + b"\n" + index.rows.astype("<i8").tobytes(), durable=False)


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
        raise ShardProblem(f"index `{path}` cannot be read: {problem}", "delete it: the tar is then scanned again") from problem
    if fields.get("v") != INDEX_VERSION or fields.get("count") != len(rows):
        raise ShardProblem(f"index `{path}` has version {fields.get('v')} and {len(rows)} rows, expected version "
                           f"{INDEX_VERSION} and {fields.get('count')} rows", "delete it: the tar is then scanned again")
    size = shard_bytes(shard)
    if fields["tar_bytes"] != size:
        raise ShardProblem(f"shard `{shard}` has {size} bytes, its index was made for {fields['tar_bytes']}",
                           "copy the shard again, or delete the index if the shard is right")
    return ShardIndex(tar_bytes=size, rows=rows)


def is_remote(shard: str) -> bool:
    """Return whether a shard is a URL that fsspec reads (`s3://…`, `memory://…`)."""
    return "://" in shard


@contextmanager
def open_shard(shard: str) -> Iterator[IO[bytes]]:
    """Open a shard for reading. Raises ShardProblem when it cannot be opened, or a remote one cannot be read to its end."""
    if is_remote(shard):
        with _asked(shard, "opened", lambda filesystem, path: filesystem.open(path, "rb")) as opened:
            yield io.BufferedReader(_RemoteStream(shard, opened), 1 << 20)
        return
    try:
        opened = open(shard, "rb")  # noqa: SIM115 closed below, after the caller's block
    except OSError as problem:
        raise ShardProblem(f"shard `{shard}` cannot be opened: {problem.strerror}",
                           "build it with `chronicle data build`, or correct the path") from problem
    with opened as stream:
        yield stream


def shard_bytes(shard: str) -> int:
    """Return the size of a shard."""
    if is_remote(shard):
        return int(_asked(shard, "found", lambda filesystem, path: filesystem.size(path)))
    with open_shard(shard) as stream:
        return stream.seek(0, io.SEEK_END)


def remote_files(place: str) -> dict[str, int | None]:
    """Return (name below a URL → bytes) of every file there; None where a listing has no sizes, as of a web server.

    Raises ShardProblem where it cannot be listed.
    """
    def listed(filesystem: Any, path: str) -> dict[str, int | None]:
        filesystem.invalidate_cache()  # what was listed earlier in this process may have changed
        root = path.rstrip("/") + "/"
        listing = filesystem.find(path, detail=True)
        if not listing:
            filesystem.info(path)  # a web server that is away has no files either
        return {name.removeprefix(root): entry.get("size") for name, entry in listing.items()
                if name.startswith(root) and name != root}

    found: dict[str, int | None] = _asked(place, "listed", listed)
    return found


class ShardReader:
    """Reads parts of one shard by offset. Each process opens its own descriptor at its first read.

    A remote store that does not answer is asked again for `PATIENCE_S` seconds.
    """

    def __init__(self, shard: str) -> None:
        self.path = self.shard = shard
        self._descriptor = -1
        self._process = 0

    def read(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset`. Raises ShardProblem when the shard is shorter, or cannot be read."""
        if is_remote(self.shard):
            content = bytes(_asked(self.shard, "read", lambda filesystem, path: filesystem.cat_file(
                path, start=offset, end=offset + size), PATIENCE_S))
            if len(content) > size:
                raise ShardProblem(f"shard `{self.shard}`: asked for {size:,} bytes of it, its server gave "
                                   f"{len(content):,}: it does not know ranges", "serve it by a server that gives parts of a "
                                   "file (nginx, a bucket), or copy the shards to this machine")
        else:
            if self._descriptor < 0 or self._process != os.getpid():  # a forked worker opens its own descriptor
                try:
                    self._descriptor, self._process = os.open(self.shard, os.O_RDONLY), os.getpid()
                except OSError as problem:
                    raise ShardProblem(f"shard `{self.shard}` cannot be opened: {problem.strerror}") from problem
            content = os.pread(self._descriptor, size, offset)
        if len(content) != size:
            raise ShardProblem(f"shard `{self.shard}` ends at byte {offset + len(content)}, expected {offset + size}",
                               "the file was truncated during training: run `chronicle data verify`")
        return content

    def close(self) -> None:
        """Close the descriptor of this process; a later read opens another."""
        if self._descriptor >= 0 and self._process == os.getpid():
            os.close(self._descriptor)
        self._descriptor = -1


# --- Remote stores

PATIENCE_S = 300.0  # a read waits so long for a store: other ranks wait 10 minutes in a collective by default
FIRST_PAUSE_S = 1.0
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, NotImplementedError, TypeError, ValueError)


def _asked(shard: str, verb: str, ask: Callable[[Any, str], Any], patience_s: float = 0.0) -> Any:
    """Return what a store answers to `ask(filesystem, path)`; raises ShardProblem, without credentials, where it does not.

    What a store refuses is final. Else (no connection, an answer that is cut, 5xx) it is asked again, at first after a second
    and ever more rarely, until `patience_s` are over; the wait and its end are told on stderr.
    """
    filesystem, path = _filesystem(shard)
    began, pause, told = time.monotonic(), FIRST_PAUSE_S, False
    while True:
        try:
            answer = ask(filesystem, path)
            if told:
                waited_s = time.monotonic() - began
                print(f"chronicle: shard `{redact(shard)}` is read again after {waited_s:.0f} s", file=sys.stderr)
            return answer
        except Exception as problem:  # noqa: BLE001 every store's package has errors of its own
            left = patience_s - (time.monotonic() - began)
            if _is_final(problem) or left <= 0:
                waited = f" ({patience_s:.0f} s long)" if told else ""
                reason, remedy = f"shard `{shard}` cannot be {verb}{waited}: {_reason(problem)}", _remedy(problem)
                hidden = redact(shard) != shard or redact(str(problem)) != str(problem)
                raise ShardProblem(reason, remedy) from (None if hidden else problem)
            if not told:
                print(f"chronicle: shard `{redact(shard)}` cannot be {verb} now: {_reason(problem)}; it is tried again for "
                      f"{patience_s:.0f} s", file=sys.stderr)
            told = True
        time.sleep(max(0.0, min(pause, left)))
        pause = min(2 * pause, 30.0)


class _RemoteStream(io.RawIOBase):
    """A file of fsspec from any place on; raises ShardProblem alone, and waits for a store as `ShardReader` does."""

    def __init__(self, shard: str, opened: Any) -> None:
        self._shard, self._opened = shard, opened

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._opened.seekable())

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._opened.seek(offset, whence))

    def tell(self) -> int:
        return int(self._opened.tell())

    def readinto(self, buffer: Any) -> int:
        # a stream without ranges, which has no cache, cannot be read again where it broke
        patience_s = PATIENCE_S if getattr(self._opened, "cache", None) is not None else 0.0
        content = _asked(self._shard, "read", lambda *_: self._opened.read(len(buffer)), patience_s)
        buffer[:len(content)] = content
        return len(content)


def _is_final(problem: BaseException) -> bool:
    """Whether asking again is of no use: no such file, no permission, a request that the store refuses."""
    # fsspec's web files report every failure as "not found"; an answer that is cut has a cause that names itself 400
    cause = problem.__cause__ if isinstance(problem, FileNotFoundError) and problem.__cause__ else problem
    answer = getattr(cause.__cause__, "response", None)  # of S3
    said = answer.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(answer, dict) else None
    status = str(said or getattr(cause, "status", None) or vars(cause).get("code", ""))  # of the web, of Google
    if status.isdigit():
        return 400 <= int(status) < 500 and status not in ("408", "429")
    return isinstance(cause, _FINAL)


def _reason(problem: BaseException) -> str:
    """Return the store's message in one line. fsspec reports failures as "not found" and keeps the real error as the cause."""
    words = str(problem.__cause__ or getattr(problem, "strerror", None) or problem) or type(problem).__name__
    return redact(" ".join(words.split()).rstrip("."))[:300]


def _remedy(problem: BaseException) -> str:
    if isinstance(problem, PermissionError) or "redential" in f"{type(problem).__name__} {problem}":
        return "give credentials where the store's package looks for them (its environment variables or files), not in the URL"
    return "correct the URL or path, or see that the store answers"


def _filesystem(url: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs
    except ImportError as problem:
        raise ShardProblem(f"remote shard `{url}` needs fsspec", "pip install fsspec") from problem
    try:
        filesystem, path = url_to_fs(url)
    except Exception as problem:  # noqa: BLE001 the protocol is unknown, its package is missing, or it finds no credentials
        raise ShardProblem(f"remote shard `{url}` cannot be opened: {_reason(problem)}",
                           "install the package that is named (s3fs and gcsfs: `chronicle-ml[remote]`), or correct the URL"
                           if isinstance(problem, ImportError | ValueError) else _remedy(problem)) from None
    return filesystem, path


# --- Shards and manifest of a source

MANIFEST_VERSION = 1
MANIFEST = "manifest.json"
STRETCH_BYTES = 16_384
HELD_OUT_EVERY = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One tar of a built source."""

    name: str
    split: str
    num_samples: int
    tar_bytes: int
    text_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceManifest:
    """Content of a built source. `digest` identifies its text and does not depend on the shard size."""

    source: str
    origin: str
    digest: str
    shards: tuple[Shard, ...]

    def of_split(self, split: str) -> tuple[Shard, ...]:
        """Return the shards of `train` or `held_out`."""
        return tuple(shard for shard in self.shards if shard.split == split)

    def to_json(self) -> dict[str, Any]:
        """Return the persisted form."""
        return {"v": MANIFEST_VERSION, "source": self.source, "origin": self.origin, "digest": self.digest,
                "shards": [asdict(shard) for shard in self.shards]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SourceManifest:
        """Read what `to_json` wrote; an unknown version is refused with both named."""
        if data.get("v") != MANIFEST_VERSION:
            raise DataError(f"data manifest has version {data.get('v')}, this program reads {MANIFEST_VERSION}")
        return cls(source=data["source"], origin=data["origin"], digest=data["digest"],
                   shards=tuple(Shard(**shard) for shard in data["shards"]))


def split_text(text: bytes) -> dict[str, list[bytes]]:
    """Cut text into stretches of 16 KiB and hold out every twentieth. Raises DataError when there are fewer than twenty.

    Nothing held out is in the training text if the text is `without_repeats`.
    """
    stretches = [text[start:start + STRETCH_BYTES] for start in range(0, len(text), STRETCH_BYTES)]
    if len(stretches) < HELD_OUT_EVERY:
        raise DataError(f"{len(text)} bytes of text, expected {(HELD_OUT_EVERY - 1) * STRETCH_BYTES + 1} or more",
                        "add text: one stretch of 16 KiB in twenty is held out")
    return {"train": [part for number, part in enumerate(stretches, 1) if number % HELD_OUT_EVERY],
            "held_out": stretches[HELD_OUT_EVERY - 1::HELD_OUT_EVERY]}


def build_source(directory: Path, source: str, text: bytes, *, origin: str,
                 shard_size_bytes: int = 4_000_000) -> SourceManifest:
    """Write shards, indexes and, last, the manifest; 64-byte repeats are left out. Raises DataError for a used directory."""
    target = directory / source
    if target.exists() and any(target.iterdir()):
        raise DataError(f"`{target}` is not empty", "name another directory, or remove its content")
    text = without_repeats(text)
    target.mkdir(parents=True, exist_ok=True)
    shards = []
    for split, stretches in split_text(text).items():
        per_shard = max(1, shard_size_bytes // STRETCH_BYTES)
        for number, start in enumerate(range(0, len(stretches), per_shard)):
            shards.append(_write_shard(target, f"{split}-{number:06d}.tar", split, start, stretches[start:start + per_shard]))
    manifest = SourceManifest(source=source, origin=origin, digest=hashlib.sha256(text).hexdigest(), shards=tuple(shards))
    write_atomic(target / MANIFEST, json.dumps(manifest.to_json(), indent=1) + "\n", durable=False)
    return manifest


def read_source_manifest(location: str) -> SourceManifest:
    """Read the manifest of a built source (directory or URL)."""
    path = shard_location(location, MANIFEST)
    try:
        with open_shard(path) as stream:
            return SourceManifest.from_json(json.loads(stream.read()))
    except ShardProblem as problem:
        cause = problem.__cause__
        if not isinstance(cause, FileNotFoundError | NotADirectoryError) or cause.__cause__ is not None:
            raise
        raise DataError(f"`{location}` holds no built source: {MANIFEST} is missing",
                        "build it with `chronicle data build`") from problem
    except (ValueError, KeyError, TypeError) as problem:
        raise DataError(f"`{path}` cannot be read: {problem}", "build the source again") from problem


def verify_source(location: str) -> Iterator[str]:
    """Yield one sentence for each shard that is missing, truncated, changed, or not in the manifest."""
    manifest = read_source_manifest(location)
    for shard in manifest.shards:
        path = shard_location(location, shard.name)
        try:
            size, digest = shard_bytes(path), _sha256(path)
            if size != shard.tar_bytes:
                yield f"shard `{path}` has {size} bytes, the manifest says {shard.tar_bytes}"
            elif digest != shard.sha256:
                yield f"shard `{path}` has changed: sha256 {digest[:12]}…, the manifest says {shard.sha256[:12]}…"
            elif (found := len(scan_tar(path))) != shard.num_samples:
                yield f"shard `{path}` holds {found} samples, the manifest says {shard.num_samples}"
        except ShardProblem as problem:
            yield str(problem)
    if not is_remote(location):
        known = {shard.name for shard in manifest.shards}
        for extra in sorted(path.name for path in Path(location).glob("*.tar") if path.name not in known):
            yield f"shard `{shard_location(location, extra)}` is not in the manifest"


def shard_location(location: str, name: str) -> str:
    """Return the path or URL of a file of a source."""
    return f"{location.rstrip('/')}/{name}"


def _write_shard(target: Path, name: str, split: str, first: int, stretches: list[bytes]) -> Shard:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for number, stretch in enumerate(stretches, first):
            member = tarfile.TarInfo(f"{split}{number:08d}.txt")
            member.size = len(stretch)
            tar.addfile(member, io.BytesIO(stretch))
    content = buffer.getvalue()
    path = target / name
    path.write_bytes(content)
    write_index(str(path), scan_tar(str(path)))
    return Shard(name=name, split=split, num_samples=len(stretches), tar_bytes=len(content),
                 text_bytes=sum(map(len, stretches)), sha256=hashlib.sha256(content).hexdigest())


def _sha256(path: str) -> str:
    digest = hashlib.sha256()
    with open_shard(path) as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()

"""A built source on disk: WebDataset tar shards of text and a manifest that lists them all.

    <directory>/<source>/train-000000.tar  …  held_out-000000.tar  …  manifest.json

Each member `<key>.txt` is a stretch of UTF-8 text; stock WebDataset reads the same files. Equal text gives tars with equal
bytes (no times, no owners), so their digests identify the data. Where the samples of a tar lie is read from its headers, when
it is opened. A tar that ends inside a member, or without its two closing zero blocks, is truncated. Files are local or,
through fsspec, remote.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from chronicle.credentials import redact
from chronicle.data.repeats import without_repeats
from chronicle.errors import DataError
from rollback.disk.durable import write_atomic

BLOCK = 512  # of a tar


class ShardProblem(DataError):
    """A shard is missing, truncated, or differs from its index or manifest; the message names the file, never a password."""

    def __init__(self, message: str, remedy: str | None = None) -> None:
        super().__init__(redact(message), remedy)


def key_hash(key: str) -> int:
    """Return a 63-bit hash of a key, equal on every machine."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") >> 1


def scan_tar(shard: str) -> tuple[list[tarfile.TarInfo], int]:
    """Read the headers of a tar: its members, and where they end. Raises ShardProblem for none, or a truncated one."""
    size = shard_bytes(shard)
    members: list[tarfile.TarInfo] = []
    end = 0
    try:
        with open_shard(shard) as stream, tarfile.open(fileobj=stream, mode="r:") as tar:
            for member in tar:
                members.append(member)
                end = tar.offset
    except tarfile.TarError as problem:
        if size and end + BLOCK <= size:
            reason = f"shard `{shard}` cannot be read as a tar at byte {end}: {problem}"
            raise ShardProblem(reason, "build or copy it again") from problem
    if end + 2 * BLOCK > size:
        reason = f"shard `{shard}` is truncated: it ends at byte {size}, expected at least {end + 2 * BLOCK}"
        raise ShardProblem(reason, "build or copy it again")
    return members, end


def is_remote(shard: str) -> bool:
    """Return whether a shard is a URL that fsspec reads (`s3://…`, `memory://…`)."""
    return "://" in shard


@contextmanager
def open_shard(shard: str) -> Iterator[IO[bytes]]:
    """Open a shard for reading. Raises ShardProblem when it cannot be opened, or a remote one cannot be read to its end."""
    if is_remote(shard):
        with _asking(shard, "opened"):
            filesystem, path = _filesystem(shard)
            opened = filesystem.open(path, "rb")
        with _asking(shard, "read"), opened as stream:
            yield stream
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
        with _asking(shard, "found"):
            filesystem, path = _filesystem(shard)
            return int(filesystem.size(path))
    with open_shard(shard) as stream:
        return stream.seek(0, io.SEEK_END)


def remote_files(place: str) -> dict[str, int | None]:
    """Return (name below a URL → bytes) of every file there; None where a listing has no sizes, as of a web server.

    Raises ShardProblem where it cannot be listed.
    """
    with _asking(place, "listed"):
        filesystem, path = _filesystem(place)
        filesystem.invalidate_cache()  # what was listed earlier in this process may have changed
        root = path.rstrip("/") + "/"
        listing = filesystem.find(path, detail=True)
        if not listing:
            filesystem.info(path)  # a web server that is away has no files either
        return {name.removeprefix(root): entry.get("size") for name, entry in listing.items()
                if name.startswith(root) and name != root}


class ShardReader:
    """Reads parts of one shard by offset. Each process opens its own descriptor at its first read."""

    def __init__(self, shard: str) -> None:
        self.path = self.shard = shard
        self._descriptor = -1
        self._process = 0

    def read(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset`. Raises ShardProblem when the shard is shorter, or cannot be read."""
        if is_remote(self.shard):
            with _asking(self.shard, "read"):
                filesystem, path = _filesystem(self.shard)
                content = bytes(filesystem.cat_file(path, start=offset, end=offset + size))
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


@contextmanager
def _asking(shard: str, verb: str) -> Iterator[None]:
    """Raise ShardProblem, without credentials, where a store does not answer; its package has asked again by then."""
    try:
        yield
    except (DataError, tarfile.TarError):
        raise
    except Exception as problem:  # noqa: BLE001 every store's package has errors of its own
        hidden = redact(shard) != shard or redact(str(problem)) != str(problem)
        reason = f"shard `{shard}` cannot be {verb}: {_reason(problem)}"
        raise ShardProblem(reason, _remedy(problem)) from (None if hidden else problem)


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
    """Write shards and, last, the manifest; 64-byte repeats are left out. Raises DataError for a used directory."""
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
            size, digest = shard_bytes(path), sha256_of(path)
            if size != shard.tar_bytes:
                yield f"shard `{path}` has {size} bytes, the manifest says {shard.tar_bytes}"
            elif digest != shard.sha256:
                yield f"shard `{path}` has changed: sha256 {digest[:12]}…, the manifest says {shard.sha256[:12]}…"
            elif (found := len(text_members(path))) != shard.num_samples:
                yield f"shard `{path}` holds {found} samples, the manifest says {shard.num_samples}"
        except ShardProblem as problem:
            yield str(problem)
    if not is_remote(location):
        known = {shard.name for shard in manifest.shards}
        for extra in sorted(path.name for path in Path(location).glob("*.tar") if path.name not in known):
            yield f"shard `{shard_location(location, extra)}` is not in the manifest"


def text_members(shard: str) -> list[tuple[int, int]]:
    """Return (first byte, bytes) of each sample of a built shard."""
    return [(member.offset_data, member.size) for member in scan_tar(shard)[0] if member.isreg()]


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
    return Shard(name=name, split=split, num_samples=len(stretches), tar_bytes=len(content),
                 text_bytes=sum(map(len, stretches)), sha256=hashlib.sha256(content).hexdigest())


def sha256_of(path: str) -> str:
    """Return the sha256 of a shard."""
    digest = hashlib.sha256()
    with open_shard(path) as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()

"""A built source on disk: WebDataset tar shards of text, their indexes, and a manifest that closes the list.

    <directory>/<source>/train-000000.tar  train-000000.tar.idx  …  held_out-000000.tar  …  manifest.json

Each member `<key>.txt` is a stretch of UTF-8 text; stock WebDataset reads the same files. Tars are byte for byte the
same for the same text (no times, no owners), so that their digests name the data.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chronicle.data.errors import DataError, ShardProblem
from chronicle.data.index import is_remote, open_shard, scan_tar, shard_bytes, write_index

MANIFEST_VERSION = 1
MANIFEST = "manifest.json"
SPLITS = ("train", "held_out")
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
    """What a built source consists of; `digest` names its text, whatever the shard size."""

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
                "shards": [{name: getattr(shard, name) for name in Shard.__slots__} for shard in self.shards]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SourceManifest:
        """Read what `to_json` wrote; an unknown version is refused with both named."""
        if data.get("v") != MANIFEST_VERSION:
            raise DataError(f"data manifest has version {data.get('v')}, this program reads {MANIFEST_VERSION}")
        return cls(source=data["source"], origin=data["origin"], digest=data["digest"],
                   shards=tuple(Shard(**shard) for shard in data["shards"]))


def split_text(text: bytes) -> dict[str, list[bytes]]:
    """Cut text into stretches of 16 KiB and hold out every twentieth. Raises DataError where that leaves none."""
    stretches = [text[start:start + STRETCH_BYTES] for start in range(0, len(text), STRETCH_BYTES)]
    if len(stretches) < HELD_OUT_EVERY:
        raise DataError(f"{len(text)} bytes of text, expected {(HELD_OUT_EVERY - 1) * STRETCH_BYTES + 1} or more",
                        "add text: one stretch of 16 KiB in twenty is held out")
    return {"train": [part for number, part in enumerate(stretches, 1) if number % HELD_OUT_EVERY],
            "held_out": stretches[HELD_OUT_EVERY - 1::HELD_OUT_EVERY]}


def build_source(directory: Path, source: str, text: bytes, *, origin: str,
                 shard_size_bytes: int = 4_000_000) -> SourceManifest:
    """Write shards, indexes and, last, the manifest. Raises DataError where the directory holds another source."""
    target = directory / source
    if target.exists() and any(target.iterdir()):
        raise DataError(f"`{target}` is not empty", "name another directory, or remove what lies there")
    target.mkdir(parents=True, exist_ok=True)
    shards = []
    for split, stretches in split_text(text).items():
        per_shard = max(1, shard_size_bytes // STRETCH_BYTES)
        for number, start in enumerate(range(0, len(stretches), per_shard)):
            shards.append(_write_shard(target, f"{split}-{number:06d}.tar", split, start, stretches[start:start + per_shard]))
    manifest = SourceManifest(source=source, origin=origin, digest=hashlib.sha256(text).hexdigest(), shards=tuple(shards))
    temporary = target / f".{MANIFEST}.{os.getpid()}"
    temporary.write_text(json.dumps(manifest.to_json(), indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, target / MANIFEST)
    return manifest


def read_manifest(location: str) -> SourceManifest:
    """Read the manifest of a built source (directory or URL)."""
    path = _join(location, MANIFEST)
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
    """Yield one sentence for each thing that is not as the manifest says: missing, truncated, changed, unlisted."""
    manifest = read_manifest(location)
    for shard in manifest.shards:
        path = _join(location, shard.name)
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
            yield f"shard `{_join(location, extra)}` is not in the manifest"


def shard_location(location: str, name: str) -> str:
    """Return the path or URL of a shard of a source."""
    return _join(location, name)


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


def _join(location: str, name: str) -> str:
    return f"{location.rstrip('/')}/{name}"

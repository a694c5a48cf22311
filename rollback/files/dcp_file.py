"""torch Distributed Checkpoint: `.metadata` as the index, `.distcp` files as rows of small torch zips.

`.metadata` is a pickle of `torch.distributed.checkpoint.metadata.Metadata`; its `storage_data` says for each entry in
which file, at which offset and how long it is (filesystem.py, torch 2.13). Each entry was written by `torch.save`, so a
`.distcp` is a row of zips; reading it as one zip would find only the last. Scalars and small objects are read as numbers
with their places. Tensors are not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from rollback.disk.content import disk_bytes
from rollback.errors import Incomplete, UnknownFormat, UnreadableFile
from rollback.files.json_file import Keys
from rollback.files.pickle_machine import Limits
from rollback.files.pickle_values import Opaque, TensorRef
from rollback.files.torch_file import naming, open_state_file, read_torch_file, read_zip_segment
from rollback.files.torch_tree import Container, Key, PickleSegment, TorchFile
from rollback.files.torch_zip import RECORD_BYTES

METADATA_NAME = ".metadata"
_MAX_ENTRIES_READ = 20_000
_MAX_ENTRY_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpChunk:
    """The place of one piece of an entry: `[offset, offset + length)` of `file`.

    `start` is where the piece of a tensor begins in the whole, in elements; empty: at its first element.
    """

    file: str
    offset: int
    length: int
    start: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpEntry:
    """One key of the saved state: its path, and for a tensor its dtype and global shape (None: an object)."""

    name: str
    keys: Keys
    dtype: str | None
    shape: tuple[int, ...] | None
    chunks: tuple[DcpChunk, ...]

    @property
    def is_small(self) -> bool:
        """Whether it is an object or a 0-dim tensor, which can be a counter or an LR."""
        return self.shape is None or self.shape == ()


def read_dcp_index(path: Path) -> tuple[DcpEntry, ...]:
    """The entries that the `.metadata` file at `path` names."""
    parts = sum(_disk_bytes(part) for part in path.parent.glob("*.distcp"))
    file = read_torch_file(path, limits=Limits.for_file(parts))
    with naming(path):
        if not isinstance(file.tree, Opaque) or not isinstance(file.tree.state, dict):
            raise UnknownFormat("not DCP metadata: expected an object with `storage_data`")
        return _entries(file.tree.state)


def _disk_bytes(path: Path) -> int:
    try:
        with open_state_file(path) as (fd, _):
            return disk_bytes(fd)
    except UnreadableFile:
        return 0  # reading it will report the problem


def _entries(state: dict[object, object]) -> tuple[DcpEntry, ...]:
    described, planned = state.get("state_dict_metadata"), state.get("planner_data")
    stored = state.get("storage_data")
    if not isinstance(described, dict) or not isinstance(stored, dict):
        raise UnknownFormat("DCP metadata without `state_dict_metadata` or `storage_data`")
    chunks: dict[str, list[DcpChunk]] = {}
    for index, info in stored.items():
        name = _field(index, "fqn")
        file, offset, length = (_field(info, field) for field in ("relative_path", "offset", "length"))
        if not isinstance(name, str) or not isinstance(file, str) or "/" in file or file in ("", ".", ".."):
            raise UnreadableFile(f"DCP metadata names the file {file!r}: expected a name in its own directory")
        if not isinstance(offset, int) or not isinstance(length, int) or offset < 0 or length < 0:
            raise UnreadableFile(f"DCP metadata has no valid offset for `{name}`")
        start = _sizes(_field(index, "offset")) or ()
        chunks.setdefault(name, []).append(DcpChunk(file=file, offset=int(offset), length=int(length), start=start))
    paths = planned if isinstance(planned, dict) else {}
    return tuple(
        _entry(str(name), about, paths.get(name), chunks.get(str(name), [])) for name, about in described.items()
    )


def _entry(name: str, about: object, path: object, chunks: list[DcpChunk]) -> DcpEntry:
    shape = _sizes(_field(about, "size"))
    properties = _field(about, "properties")
    first = properties.state if isinstance(properties, Opaque) else None
    dtype = getattr(first[0], "name", None) if isinstance(first, tuple) and first else None
    keys: Keys = tuple(k if isinstance(k, str) else int(k) for k in path if isinstance(k, (str, int))) if isinstance(
        path, (tuple, list)) else (name,)  # fmt: skip
    return DcpEntry(name=name, keys=keys, dtype=dtype, shape=shape, chunks=tuple(chunks))


def _sizes(value: object) -> tuple[int, ...] | None:
    return tuple(int(size) for size in value if isinstance(size, int)) if isinstance(value, (tuple, list)) else None


def _field(value: object, name: str) -> object:
    return value.children().get(name) if isinstance(value, Opaque) else None


def read_dcp_directory(directory: Path) -> tuple[TorchFile, dict[Keys, str]]:
    """The whole state as one tree, and for the path of each small entry the file that holds it.

    Places in the tree belong to the single files: to edit one, use `read_distcp_file`.
    """
    index = read_dcp_index(directory / METADATA_NAME)
    tree: dict[Key, object] = {}
    located: dict[Keys, str] = {}
    for name in sorted({chunk.file for entry in index for chunk in entry.chunks if entry.is_small}):
        part = _read_entries(directory / name, index)
        for keys, value in part:
            _put(tree, keys, value[0])
            located[keys] = name
    for entry in index:
        if not entry.is_small and entry.shape is not None:
            _put(tree, entry.keys, TensorRef(entry.dtype or "unknown", entry.shape, (0,) * len(entry.shape), None, 0))
    file = TorchFile(
        path=directory / METADATA_NAME,
        container=Container.DCP,
        tree=_with_lists(tree),
        segments=(),
        size_bytes=(directory / METADATA_NAME).stat().st_size,
    )
    return file, located


def read_distcp_file(path: Path) -> TorchFile:
    """The small entries of one `.distcp` file, as a tree under their paths; needs the `.metadata` beside it."""
    if not (path.parent / METADATA_NAME).is_file():
        raise Incomplete(
            f"`{path.parent / METADATA_NAME}` is missing: it holds the offsets of the entries in the `.distcp` files"
        )
    tree: dict[Key, object] = {}
    segments: list[PickleSegment] = []
    for keys, (value, segment) in _read_entries(path, read_dcp_index(path.parent / METADATA_NAME)):
        _put(tree, keys, value)
        segments.append(segment)
    return TorchFile(
        path=path,
        container=Container.DCP,
        tree=_with_lists(tree),
        segments=tuple(segments),
        size_bytes=path.stat().st_size,
    )


def _read_entries(path: Path, index: tuple[DcpEntry, ...]) -> Iterator[tuple[Keys, tuple[object, PickleSegment]]]:
    """(path in the state, (value, segment)) of each small entry in one file; segment numbers count from 0."""
    here = [(entry, chunk) for entry in index if entry.is_small for chunk in entry.chunks if chunk.file == path.name]
    if len(here) > _MAX_ENTRIES_READ:
        raise UnreadableFile(f"`{path}` holds {len(here)} small entries: at most {_MAX_ENTRIES_READ} are read")
    if not path.exists():
        raise Incomplete(f"`{path}` is missing: the metadata beside it names {len(here)} entries in it")
    with open_state_file(path) as (fd, size_bytes), naming(path):
        limits = Limits.for_file(8 * disk_bytes(fd))  # entries may overlap, so they share the limits of one file
        for number, (entry, chunk) in enumerate(here):
            if chunk.offset + chunk.length > size_bytes or chunk.length > _MAX_ENTRY_BYTES:
                raise UnreadableFile(
                    f"entry `{entry.name}` ends at byte {chunk.offset + chunk.length}, the file at {size_bytes}: truncated"
                )
            content, segment = read_zip_segment(fd, chunk.offset, chunk.length, index=number, limits=limits)
            limits = limits.less(
                content.num_bytes + RECORD_BYTES * len(segment.layout.records if segment.layout else ())
            )
            yield entry.keys, (content.value, replace(segment, keys=entry.keys))


def missing_chunks(directory: Path) -> list[tuple[str, str]]:
    """(file, problem) for each `.distcp` that is missing or too short for its entries."""
    wanted: dict[str, int] = {}
    for entry in read_dcp_index(directory / METADATA_NAME):
        if not entry.chunks:
            wanted.setdefault("", 0)
        for chunk in entry.chunks:
            wanted[chunk.file] = max(wanted.get(chunk.file, 0), chunk.offset + chunk.length)
    problems: list[tuple[str, str]] = []
    for name, end in sorted(wanted.items()):
        path = directory / name
        if not name:
            problems.append(
                (METADATA_NAME, "an entry of the metadata is in no file: a rank's part was never written")
            )
        elif not path.is_file():
            problems.append((name, f"is missing: the metadata places entries up to byte {end} in it"))
        elif path.stat().st_size < end:
            problems.append(
                (name, f"has {path.stat().st_size} bytes, the metadata places entries up to byte {end} in it")
            )
    return problems


def _put(tree: dict[Key, object], keys: Keys, value: object) -> None:
    for key in keys[:-1]:
        inner = tree.setdefault(key, {})
        if not isinstance(inner, dict):
            return  # one entry is inside another: the outer one is kept
        tree = inner
    if keys:
        tree[keys[-1]] = value


def _with_lists(value: object) -> object:
    """Turn dicts with the keys 0..n-1 back into lists; with gaps (entries in other files) they stay dicts."""
    if not isinstance(value, dict):
        return value
    parts = {key: _with_lists(part) for key, part in value.items()}
    if parts and all(isinstance(key, int) for key in parts) and sorted(parts) == list(range(len(parts))):
        return [parts[index] for index in range(len(parts))]
    return parts

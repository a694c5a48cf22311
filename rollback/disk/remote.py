"""Checkpoints in an object store: a local directory that shows the names and sizes of the objects, and reads them by range.

`local_path` lists what lies below a URL (`s3://bucket/run/checkpoints`) through fsspec, and makes an empty file of the right
size for each object in a temporary directory. Every reader of this package then works as on a disk: where it opens such a
file (`rollback.disk.content`), it gets a descriptor whose bytes are fetched from the store, only those that it asks for. That
descriptor itself cannot be read (`O_PATH`), so that no hole is taken for content. Nothing is written through a view: what a
rollback writes goes through `Bucket`, which creates objects and replaces one only where it is still the one that was read.

What a store answers is checked: as many bytes as were asked for, and at the end the same objects as were listed. `StoreFailed`
says that it did not, and never that a checkpoint is damaged. fsspec and its clients are optional (`chronicle-ml[remote]`) and
imported when a URL is given. A `file://` URL is the local path that it names.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import tempfile
import threading
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rollback.disk import RemoteFile, RemoteView
from rollback.errors import Refused, StoreFailed

# `Path("s3://bucket/x")` is `s3:/bucket/x`: settings hold paths, so both are read
_URL = re.compile(r"([a-z][a-z0-9+.-]+):/+(.*)", re.DOTALL)
_PIECE_BYTES = 8 * 2**20
_OF_A_RUN = ("run.json", "contract.json", "journal-ends")
_GOOGLE = ("gs://", "gcs://")
_AT_ONCE = 16  # requests
_INSTALL = "pip install 'chronicle-ml[remote]'"
_MOST_OBJECTS = 1_000_000
_LEAST_BYTES = 1024  # of one request: the header of a zip record, and the number behind it
_MOST_AHEAD = 256 * 2**10  # when a file is read from front to back
_KEPT_BYTES = 16 * 2**20  # of one file
# what tells two states of an object apart, in the words of the stores' clients
_MARKS = (
    *("ETag", "etag", "generation", "md5Hash", "crc32c", "VersionId", "LastModified", "last_modified", "updated", "mtime"),
    "created",
)


def local_path(named: str | Path) -> Path:
    """The local path to read what `named` names: of a URL its view, of a `file://` URL its path, else `named` itself.

    Raises `StoreFailed` when the store does not answer or cannot be listed as files.
    """
    found = _URL.fullmatch(str(named))
    if found is None:
        return Path(named)
    if found[1] == "file":
        return Path("/" + found[2])
    if not isinstance(RemoteView.opened, _View):
        RemoteView.opened = _View()
    return RemoteView.opened.show(found[1], found[2].rstrip("/"))


def fetch_whole(directory: Path) -> None:
    """Fetch the journal and the small files of a run, for readers that open them as files."""
    if view := _view():
        view.fetch_whole(os.path.abspath(directory))


def shown(text: str) -> str:
    """`text` with the URL in place of the local path of each view."""
    return text if RemoteView.opened is None else RemoteView.opened.shown(text)


def notes() -> tuple[str, ...]:
    """What could not be looked at in the stores, one sentence each."""
    view = _view()
    return tuple(view.notes) if view else ()


def object_mark(path: Path) -> tuple[int, str]:
    """(size in bytes, tag) of the object that a file of a view stands for: its generation in gs://, its ETag in s3://.

    The tag is "" where the store tells none.
    """
    view = _view()
    found = view.objects.get(os.path.abspath(path)) if view else None
    if found is None:
        raise StoreFailed(f"`{shown(str(path))}` is no object that was listed", "repeat the command")
    wanted = ("generation",) if found.url.startswith(_GOOGLE) else ("ETag",)
    tags = [value for name, _, value in (mark.partition("=") for mark in found.mark) if name in wanted]
    return found.size_bytes, tags[0] if tags else ""


def bytes_read() -> int:
    """How many bytes of objects were fetched by this process."""
    view = _view()
    return view.bytes_read if view else 0


def refuse_changed() -> None:
    """Raise `StoreFailed` if an object that was read is not the one that was listed."""
    if view := _view():
        view.compare()


def accept_changes() -> None:
    """Do not compare again what was read so far: the command that read it writes from now on, or has compared it."""
    if view := _view():
        for one in view.all_objects():
            one.was_read = False


def _view() -> _View | None:
    return RemoteView.opened if isinstance(RemoteView.opened, _View) else None


class _View(RemoteView):
    """The objects of all stores that one command looks at, as files below one temporary directory."""

    def __init__(self) -> None:
        self.directory = tempfile.mkdtemp(prefix="chronicle-store-")
        atexit.register(shutil.rmtree, self.directory, ignore_errors=True)
        self.directory_of = re.compile(re.escape(self.directory) + r"/([a-z][a-z0-9+.-]+)(?:/|$)")
        self.objects: dict[str, _Object] = {}  # by local path
        self.fetched: dict[str, _Object] = {}  # files whose bytes are here
        self.listed: dict[str, tuple[str, Any, str]] = {}  # URL -> its scheme, filesystem and name there
        self.notes: list[str] = []
        self.bytes_read = 0

    def all_objects(self) -> Iterator[_Object]:
        """What was listed, whether its bytes are here or not."""
        yield from self.objects.values()
        yield from self.fetched.values()

    def show(self, scheme: str, rest: str) -> Path:
        """List what lies below a URL, and the names beside it; returns the local path that stands for it."""
        url = f"{scheme}://{rest}"
        if ".." in rest.split("/") or scheme in ("http", "https"):
            raise StoreFailed(f"`{url}` cannot be listed", "name a bucket and a prefix: s3://BUCKET/PREFIX")
        if url not in self.listed:
            filesystem, base = _open_store(url)
            self.listed[url] = scheme, filesystem, base
            found = _find(filesystem, base, url)
            self._add(scheme, filesystem, found, url)
            self._add_neighbours(scheme, filesystem, base, url)
        return Path(self.directory, scheme, rest.strip("/"))

    def _add_neighbours(self, scheme: str, filesystem: Any, base: str, url: str) -> None:
        """The names beside it, where a loader may look too, and abandoned checkpoints."""
        parent, _, name = base.rstrip("/").rpartition("/")
        if not parent or not name:
            return
        try:
            beside = {one["name"]: one for one in filesystem.ls(parent, detail=True)}
            for key in list(beside):
                if key.rstrip("/") == f"{parent}/abandoned" and beside[key].get("type") == "directory":
                    beside.update(filesystem.find(key, detail=True))
        except Exception as problem:  # noqa: BLE001 each store's client raises its own; what lies beside is not needed
            self.notes.append(f"not looked at: what lies beside `{url}` ({_words(problem)})")
            return
        self._add(scheme, filesystem, beside, url)

    def _add(self, scheme: str, filesystem: Any, found: Mapping[str, Mapping[str, Any]], url: str) -> None:
        if len(found) > _MOST_OBJECTS:
            raise StoreFailed(f"`{url}` holds {len(found)} objects: at most {_MOST_OBJECTS} are listed", "name a longer prefix")
        for name, info in sorted(found.items()):
            parts = name.strip("/").split("/")
            path = os.path.join(self.directory, scheme, *parts)
            if any(part in ("", ".", "..") or "\0" in part or len(os.fsencode(part)) > 255 for part in parts):
                raise StoreFailed(f"`{scheme}://{name}` is no name of a file: `{url}` cannot be read as files", "rename it")
            size_bytes = info.get("size")
            try:
                if info.get("type") == "directory" or (name.endswith("/") and not size_bytes):
                    os.makedirs(path, exist_ok=True)
                elif not isinstance(size_bytes, int):
                    raise StoreFailed(f"`{scheme}://{name}` has no size that the store tells", "copy it to a disk")
                elif not (os.path.isdir(path) and not size_bytes):  # an empty object marks the folder of that name
                    self._add_object(path, _Object(self, filesystem, name, f"{scheme}://{name}", size_bytes, _mark(info)))
            except OSError as problem:
                raise StoreFailed(
                    f"`{scheme}://{name}` cannot be shown as a file in `{self.directory}`: {problem.strerror}",
                    "an object and a folder of the same name cannot both be there; TMPDIR names another place",
                ) from None

    def _add_object(self, path: str, found: _Object) -> None:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if path not in self.objects and path not in self.fetched:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0)
            try:
                os.ftruncate(fd, found.size_bytes)
            finally:
                os.close(fd)
            self.objects[path] = found

    def open(self, path: Path) -> RemoteFile | None:
        """The descriptor of the file that stands for an object."""
        found = self.objects.get(os.path.abspath(path))
        if found is None:
            return None
        opened = RemoteFile(os.open(path, getattr(os, "O_PATH", os.O_RDONLY) | os.O_CLOEXEC))
        opened.fetch, opened.prefetch, opened.stream = found.fetch, found.prefetch, found.stream
        return opened

    def mark(self, path: Path) -> tuple[str, ...] | None:
        """ETag and the like of the object."""
        found = self.objects.get(os.path.abspath(path))
        return None if found is None else found.mark

    def shown(self, text: str) -> str:
        """`text` with URLs."""
        return self.directory_of.sub(r"\1://", text)

    def fetch_whole(self, directory: str) -> None:
        """Fetch what lies below `directory`, but for the logs of its launches, which are read by range."""
        for path, found in list(self.objects.items()):
            inner = os.path.relpath(path, directory).split(os.sep)
            if inner[0] in ("journal", "heartbeats") or (len(inner) == 1 and inner[0] in _OF_A_RUN):
                os.chmod(path, 0o600)
                with open(path, "r+b") as file:
                    for start in range(0, found.size_bytes, _PIECE_BYTES):
                        file.write(found.stream(start, min(_PIECE_BYTES, found.size_bytes - start)))
                self.fetched[path] = self.objects.pop(path)

    def compare(self) -> None:
        """List again, and compare the objects of which something was read."""
        for url, (_, filesystem, base) in self.listed.items():
            read = [one for one in self.all_objects() if one.was_read]
            below = base.rstrip("/") + "/"
            inside = [o for o in read if o.filesystem is filesystem and (o.name == base or o.name.startswith(below))]
            if not inside:
                continue
            now = _find(filesystem, base, url)
            for one in inside:
                info = now.get(one.name)
                if info is None or (info.get("size"), _mark(info)) != (one.size_bytes, one.mark):
                    what = "is gone" if info is None else "was replaced"
                    raise StoreFailed(
                        f"`{one.url}` {what} while it was read: nothing is said about its checkpoint",
                        "repeat the command when no launch writes to that prefix",
                    )


class _Object:
    """One object: where it is, what was listed of it, and the ranges that were fetched."""

    def __init__(self, view: _View, filesystem: Any, name: str, url: str, size_bytes: int, mark: tuple[str, ...]) -> None:
        self.view, self.filesystem, self.name, self.url = view, filesystem, name, url
        self.size_bytes, self.mark, self.was_read = size_bytes, mark, False
        self.starts: list[int] = []
        self.ranges: list[bytes] = []  # at `starts`, disjoint or overlapping
        self.next_start, self.ahead = -1, _LEAST_BYTES
        self.lock = threading.Lock()

    def fetch(self, offset: int, count: int) -> bytes:
        """Up to `count` bytes at `offset`, from what is kept or from the store."""
        count = max(0, min(count, self.size_bytes - offset))
        with self.lock:
            index = self._kept_at(offset)
            if index is not None:
                start = offset - self.starts[index]
                return self.ranges[index][start : start + count]
            if not count:
                return b""
            self.ahead = min(2 * self.ahead, _MOST_AHEAD) if offset == self.next_start else _LEAST_BYTES
            data = self.stream(offset, min(max(count, self.ahead), self.size_bytes - offset))
            self._keep(offset, data)
            return data[:count]

    def prefetch(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Ask for ranges that will be read, sixteen at a time."""
        from concurrent.futures import ThreadPoolExecutor

        wanted = [(at, min(count, self.size_bytes - at)) for at, count in sorted(ranges) if 0 <= at < self.size_bytes]
        wanted = [(at, count) for at, count in wanted if self._kept_at(at) is None]
        with self.lock, ThreadPoolExecutor(max_workers=_AT_ONCE) as threads:
            for (at, _), data in zip(wanted, threads.map(lambda one: self.stream(*one), wanted), strict=True):
                self._keep(at, data)

    def _kept_at(self, offset: int) -> int | None:
        """Which of the kept ranges holds this byte."""
        index = bisect_right(self.starts, offset) - 1
        return index if index >= 0 and offset < self.starts[index] + len(self.ranges[index]) else None

    def _keep(self, offset: int, data: bytes) -> None:
        self.next_start = offset + len(data)
        if sum(map(len, self.ranges)) + len(data) > _KEPT_BYTES:
            self.starts, self.ranges = [], []
        if len(data) <= _KEPT_BYTES:
            index = bisect_right(self.starts, offset)
            self.starts.insert(index, offset)
            self.ranges.insert(index, data)

    def stream(self, offset: int, count: int) -> bytes:
        """Exactly these bytes from the store, not kept. Raises `StoreFailed`."""
        self.was_read = True
        with _asking(self.url):
            data = bytes(self.filesystem.cat_file(self.name, start=offset, end=offset + count))
        self.view.bytes_read += len(data)
        if len(data) != count:
            raise StoreFailed(
                f"`{self.url}`: the store gave {len(data)} bytes at {offset}, {count} were asked for", "repeat the command"
            )
        return data


def _mark(info: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(f"{key}={info[key]}" for key in _MARKS if info.get(key) is not None)


def _open_store(url: str) -> tuple[Any, str]:
    """The fsspec filesystem of a URL, and the name of what it names there."""
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise StoreFailed(f"`{url}` is in a store, which is read with fsspec: it is not installed", _INSTALL) from None
    try:
        if url.startswith(_GOOGLE):
            _import_gcsfs()
        filesystem, base = url_to_fs(url, use_listings_cache=False)
    except ImportError as problem:
        raise StoreFailed(f"`{url}`: the client of this store is not installed ({_words(problem)})", _INSTALL) from None
    except Exception as problem:  # noqa: BLE001 each store's client raises its own
        raise StoreFailed(f"`{url}` cannot be opened: {_words(problem)}", "is it s3://BUCKET/PREFIX or gs://…?") from None
    return filesystem, str(base)


def _import_gcsfs() -> None:
    """gcsfs by the JSON API alone, unless the environment says otherwise; the environment stays as it is.

    Since 2026 it asks by gRPC first what kind of bucket it is, and waits a minute for each answer where gRPC does not pass.
    """
    name = "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"
    told = os.environ.get(name)
    os.environ[name] = told or "false"
    try:
        import gcsfs  # noqa: F401
    finally:
        os.environ.pop(name) if told is None else os.environ.update({name: told})


def _find(filesystem: Any, base: str, url: str) -> dict[str, Any]:
    """Name -> what the store tells, of each object below `base`, or of the object itself."""
    with _asking(url):
        filesystem.invalidate_cache()
        try:
            found = filesystem.find(base, detail=True)
            return {name: info or filesystem.info(name) for name, info in found.items()}
        except FileNotFoundError:
            return {}


@contextmanager
def _asking(url: str) -> Iterator[None]:
    """Whatever the client of a store raises becomes one sentence."""
    try:
        yield
    except (StoreFailed, Superseded):
        raise
    except FileNotFoundError:
        raise StoreFailed(f"`{url}` is not there, or was removed while it was read", "`chronicle verify` again") from None
    except PermissionError as problem:
        raise StoreFailed(f"the store does not let `{url}` be used: {_words(problem)}", "check the credentials") from None
    except Exception as problem:  # noqa: BLE001 each store's client raises its own
        if _is_superseded(problem):
            raise Superseded(url) from None
        raise StoreFailed(f"the store did not answer for `{url}`: {_words(problem)}", "repeat the command") from None


def _words(problem: BaseException) -> str:
    """The first line of an error, at most 200 characters."""
    text = next(iter(str(problem).splitlines()), "")
    return (f"{type(problem).__name__}: {text}" if text else type(problem).__name__)[:200]


# --- Writing: new objects, and one pointer that is replaced only while it is the one that was read

_SIMPLE_ETAG = re.compile(r'"?[0-9a-f]{32}"?')  # the MD5 of the content: no multipart upload, no key of the customer
_COMPARED_BYTES = 8 * 2**20


class Superseded(Exception):
    """A conditional put was refused: the object is there already, or is not the one that was read."""


def open_bucket(url: str) -> Bucket:
    """The bucket of a URL, to write to it. Raises `Refused` for stores whose conditional puts are not known here."""
    url = re.sub(":/+", "://", url, count=1)
    if url.startswith(_GOOGLE):
        return GoogleBucket(url)
    if url.startswith(("s3://", "s3a://")):
        return Bucket(url)
    raise Refused(
        f"`{url}` is in an object store whose conditional puts are not known here: a rollback ends with one "
        "(`If-Match`, `ifGenerationMatch`), which is made for s3:// and gs:// only",
        "copy the checkpoint to a disk, work there, and upload the result under a new prefix",
    )


class Bucket:
    """Writes to one S3 bucket: objects under a prefix of their own by the store's client, and a pointer on a condition.

    A tag tells two states of an object apart: the ETag. Raises `StoreFailed` where the store does not answer, `Superseded`
    where a condition does not hold.
    """

    conditions = "`If-None-Match`, `If-Match`"
    no_such_tag = '"00000000000000000000000000000000"'
    tag = "ETag"  # in what the client tells of an object

    def __init__(self, url: str) -> None:
        """Open the bucket of a URL."""
        self.scheme = url.partition(":")[0]
        self.filesystem, base = _open_store(url)
        self.name = base.partition("/")[0]

    def refuse_unconditional(self, folder: str) -> None:
        """Raise `Refused` unless the store honours both conditions: tried on an own object in `folder`."""
        probe = f"{folder.rstrip('/')}/chronicle-probe"
        etag = self.put(probe, b"1", etag=None)
        try:
            for wrong in (None, self.no_such_tag):
                try:
                    self.put(probe, b"2", etag=wrong)
                except Superseded:
                    continue
                raise Refused(
                    f"`{probe}` was overwritten against its condition: this store does not honour conditional puts "
                    f"({self.conditions}), so another writer of the pointer could be lost",
                    "use a store that does, or copy the checkpoint to a disk, work there, and upload it under a new prefix",
                )
            self.put(probe, b"3", etag=etag)
        finally:
            self.remove(probe)

    def etag(self, url: str) -> str | None:
        """The tag of an object; None where there is none."""
        found = self._info(url)
        return None if found is None else str(found[self.tag])

    def size(self, url: str) -> int | None:
        """Bytes of an object; None where there is none."""
        found = self._info(url)
        return None if found is None else int(found["size"])

    def read(self, url: str) -> tuple[bytes, str] | None:
        """(content, tag) of a small object; None where there is none."""
        while (etag := self.etag(url)) is not None:
            with _asking(url):
                data = bytes(self.filesystem.cat_file(self._path(url)))
            if self.etag(url) == etag:
                return data, etag
        return None

    def put(self, url: str, content: bytes, *, etag: str | None) -> str:
        """Write an object that does not exist (`etag` None) or that still has this tag; returns its new tag."""
        condition = {"IfNoneMatch": "*"} if etag is None else {"IfMatch": etag}
        with _asking(url):
            made = self.filesystem.call_s3("put_object", Bucket=self.name, Key=self._key(url), Body=content, **condition)
        return str(made["ETag"])

    def upload(self, source: Path, url: str) -> None:
        """Create an object with the bytes of a local file."""
        with _asking(url):
            self.filesystem.put_file(str(source), self._path(url), mode="create")

    def copy(self, source: str, url: str) -> None:
        """Copy an object inside the store; whether the source is still the planned one is asked afterwards (`has_copy`)."""
        with _asking(url):
            self.filesystem.cp_file(self._path(source), self._path(url))

    def has_copy(self, source: str, url: str, size_bytes: int, etag: str) -> bool:
        """Whether an object holds the bytes of another one that has this tag: by the MD5 of both, else all of both are read."""
        origin, copied = self._info(source), self._info(url)
        if origin is None or copied is None or str(origin[self.tag]) != etag or int(copied["size"]) != size_bytes:
            return False
        digests = _md5_of(origin), _md5_of(copied)
        if all(digests):
            return digests[0] == digests[1]
        pairs = zip(self.stream(source, size_bytes), self.stream(url, size_bytes), strict=True)
        return all(one == other for one, other in pairs) and self.etag(source) == etag

    def stream(self, url: str, size_bytes: int) -> Iterator[bytes]:
        """The bytes of an object in pieces of 8 MiB."""
        for start in range(0, size_bytes, _COMPARED_BYTES):
            end = min(start + _COMPARED_BYTES, size_bytes)
            with _asking(url):
                data = bytes(self.filesystem.cat_file(self._path(url), start=start, end=end))
            if len(data) != end - start:
                raise StoreFailed(f"`{url}`: the store gave {len(data)} bytes at {start}, {end - start} were asked for")
            yield data

    def below(self, folder: str) -> list[str]:
        """URLs of all objects below a prefix."""
        return [f"{self.scheme}://{name}" for name in sorted(_find(self.filesystem, self._path(folder).rstrip("/"), folder))]

    def remove(self, url: str) -> None:
        """Delete an object that this program created."""
        with _asking(url):
            self.filesystem.rm_file(self._path(url))

    def _info(self, url: str) -> Mapping[str, Any] | None:
        """What the store tells of an object; None where there is none."""
        with _asking(url):
            self.filesystem.invalidate_cache()
            try:
                found: Mapping[str, Any] = self.filesystem.info(self._path(url))
            except FileNotFoundError:
                return None
        return None if found["type"] == "directory" else found

    def _path(self, url: str) -> str:
        return f"{self.name}/{self._key(url)}"

    def _key(self, url: str) -> str:
        return re.sub("^[a-z0-9]+:/+", "", url).partition("/")[2]


class GoogleBucket(Bucket):
    """Writes to one bucket of Google Cloud Storage through its JSON API; the tag of an object is its generation.

    `ifGenerationMatch=0` creates, another number replaces that generation alone
    (https://cloud.google.com/storage/docs/request-preconditions).
    """

    conditions = "`ifGenerationMatch`"
    no_such_tag = "1"  # generations are microseconds since 1970
    tag = "generation"

    def put(self, url: str, content: bytes, *, etag: str | None) -> str:
        """Write an object that does not exist (`etag` None) or that still has this generation; returns its new one."""
        target = f"{self.filesystem._location}/upload/storage/v1/b/{{}}/o"
        words = {"uploadType": "media", "name": self._key(url), "ifGenerationMatch": etag or "0", "data": content}
        with _asking(url):
            made = self.filesystem.call("POST", target, self.name, json_out=True, **words)
        return str(made["generation"])


def _md5_of(info: Mapping[str, Any]) -> str:
    """The MD5 of an object's content as its store tells it; "" where it does not: composed, or uploaded in parts."""
    etag = str(info.get("ETag") or "")
    return str(info.get("md5Hash") or (etag if _SIMPLE_ETAG.fullmatch(etag) else ""))


def _is_superseded(problem: BaseException) -> bool:
    """Whether a store refused by a condition: 412, or 409 while another put is under way, in the words of its client."""
    answer = getattr(problem.__cause__ or problem, "response", None) or {}
    codes = (getattr(problem, "code", None), (answer.get("ResponseMetadata") or {}).get("HTTPStatusCode"))
    return isinstance(problem, FileExistsError) or any(code in (409, 412) for code in codes)

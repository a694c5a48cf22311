"""Installed packages as a replay finds them: which of their files hold what an installation brought, and whether it is of then.

An installation says the digest of each of its files (`RECORD` in its `dist-info`). The time of a file's last change tells
less: whoever links the same file into another environment (uv does) changes it, and not one byte.
"""

import base64
import csv
import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import source_from_cache
from pathlib import Path

__all__ = ["InstalledPackages", "places_of_installed"]

CODE = (".py", ".pyc", ".so")


def places_of_installed() -> Iterator[str]:
    """The directories of the standard library and of installed packages."""
    for name in ("stdlib", "platstdlib", "purelib", "platlib"):
        if path := sysconfig.get_paths().get(name):
            yield path
    yield from (path for path in sys.path if path.rstrip("/").endswith(("site-packages", "dist-packages")))


class InstalledPackages:
    """What the `dist-info` of this machine's packages say; each directory of packages is read once, when it is asked for."""

    def __init__(self) -> None:
        self._places = [os.path.realpath(place) for place in places_of_installed()]
        self._told: dict[str, dict[str, tuple[str, str]]] = {}

    def is_as_installed(self, path: str) -> bool:
        """Whether a file of an installed package holds what the package brought; compiled ones of Python do."""
        path = os.path.realpath(path)
        site = _site_of(path)
        if site is None:  # the standard library and the settings of a virtual environment
            inside = (*(place + os.sep for place in self._places), os.path.realpath(sys.prefix) + os.sep)
            return path.startswith(inside)
        told, _ = self._of(site).get(os.path.relpath(path, site), ("", ""))
        if not told:
            return "dist-info" in os.path.relpath(path, site)
        try:
            return told == _digest_of(path)
        except OSError:
            return False

    def newer_than(
        self, begun: float, read: Iterable[str], then: Mapping[str, str], now: Mapping[str, str]
    ) -> Iterator[str]:
        """Names of packages whose code was read, and of which it is not known that they are those of `begun` (seconds).

        `then`, `now`: the versions that the record and the replay told; where both tell the same one it is that one.
        """
        changed: dict[str, list[str]] = {}
        for path in dict.fromkeys(map(_source_of, read)):
            site = _site_of(path)
            if site is not None and path.endswith(CODE) and _changed(path) > begun:
                name = os.path.relpath(path, site).split(os.sep)[0].partition(".")[0]
                changed.setdefault(name, []).append(path)
        for name, paths in changed.items():
            is_same = name in then and then[name] == now.get(name)
            if not is_same and not all(self._is_of_then(path, begun) for path in paths):
                yield name

    def _is_of_then(self, path: str, begun: float) -> bool:
        """Whether an installation that is older than `begun` brought this file as it is."""
        site = _site_of(path) or ""
        _, owner = self._of(site).get(os.path.relpath(path, site), ("", ""))
        return bool(owner) and _changed(os.path.join(site, owner)) <= begun and self.is_as_installed(path)

    def _of(self, site: str) -> dict[str, tuple[str, str]]:
        """Path in a directory of packages -> digest, and the `dist-info` that says so."""
        if site not in self._told:
            self._told[site] = rows = {}
            for record in sorted(Path(site).glob("*.dist-info/RECORD")):
                try:
                    lines = list(csv.reader(record.read_text(encoding="utf-8").splitlines()))
                except (OSError, ValueError, csv.Error):
                    continue
                rows.update({row[0]: (row[1], record.parent.name) for row in lines if len(row) > 1})
        return self._told[site]


def _site_of(path: str) -> str | None:
    """The directory of packages in which a file lies."""
    site, mark, _ = path.rpartition("-packages" + os.sep)
    return site + mark.rstrip(os.sep) if mark else None


def _source_of(path: str) -> str:
    """Of bytecode the source, if that is where it should be."""
    try:
        source = source_from_cache(path) if path.endswith(".pyc") else path
    except ValueError:
        return path
    return source if os.path.exists(source) else path


def _changed(path: str) -> float:
    try:
        return os.stat(path).st_ctime
    except OSError:
        return 0.0


def _digest_of(path: str) -> str:
    digest = hashlib.sha256(Path(path).read_bytes()).digest()
    return "sha256=" + base64.urlsafe_b64encode(digest).decode().rstrip("=")

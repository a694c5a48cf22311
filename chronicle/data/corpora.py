"""Read text corpora from this machine: Python's own sources, installed Debian packages, and folders of text.

`code` is the standard library's own sources (PSF licence), `reference` the language reference in reST inside it (PSF),
`gcide` the GNU Collaborative International Dictionary of English from Debian's `dict-gcide` (GPL), `python-doc` the
documentation sources of a `python3.*-doc` package (PSF). Nothing is downloaded.
"""

from __future__ import annotations

import ast
import gzip
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path

from chronicle.errors import DataError

TEXT_SUFFIXES = frozenset({".txt", ".md", ".rst", ".py", ".tex", ".html", ".json", ".c", ".h"})
_SKIPPED_DIRECTORIES = frozenset({"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__",
                                  "pydoc_data", "encodings", "lib2to3"})
_GCIDE = "usr/share/dictd/gcide.dict.dz"
_DOC_GLOB = "usr/share/doc/python3*/html/_sources/**/*.rst.txt"


class CorpusMissing(DataError):
    """A corpus is not installed; the remedy names the command that installs it."""


def read_text(corpus: str, *, root: Path = Path("/")) -> bytes:
    """Return the text of a corpus: a name, or its package's, or a folder. Raises CorpusMissing or DataError."""
    corpus = _PACKAGES.get(corpus, corpus)
    if corpus in _READERS:
        return _READERS[corpus](root)
    path = Path(corpus)
    if path.is_dir():
        return read_folder(path)
    known = ", ".join(sorted({*_READERS, *_PACKAGES}))
    raise DataError(f"unknown corpus `{corpus}`: expected one of {known}, or a folder")


def read_folder(folder: Path) -> bytes:
    """Return all text files below a folder, sorted by name, joined. Raises DataError for none or for no UTF-8."""
    files = _each_once(path for path in folder.rglob("*") if path.is_file() and path.suffix in TEXT_SUFFIXES)
    if not files:
        raise DataError(f"folder `{folder}` holds no text files ({', '.join(sorted(TEXT_SUFFIXES))})")
    return b"\n".join(_checked(path) for path in files)


def _each_once(paths: Iterable[Path]) -> list[Path]:
    """Return the resolved files, sorted, each once: a text under two names could be in training and held-out data."""
    return sorted({path.resolve() for path in paths})


def _checked(path: Path) -> bytes:
    content = path.read_bytes()
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise DataError(f"`{path}` is not UTF-8: byte {content[problem.start]:#04x} at offset {problem.start}",
                        "convert it to UTF-8 or remove it from the folder") from problem
    return content


def _stdlib_code(root: Path) -> bytes:
    directory = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in directory.rglob("*.py")
                   if not _SKIPPED_DIRECTORIES & set(path.relative_to(directory).parts))
    return b"".join(path.read_bytes() for path in files)


def _language_reference(root: Path) -> bytes:
    path = Path(sysconfig.get_paths()["stdlib"]) / "pydoc_data" / "topics.py"
    if not path.is_file():
        raise CorpusMissing(f"corpus `reference` needs `{path}`, which this Python lacks")
    assigned = next(node.value for node in ast.parse(path.read_text(encoding="utf-8")).body
                    if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None)
    topics: dict[str, str] = ast.literal_eval(assigned)
    return "\n\n".join(topics[key] for key in sorted(topics)).encode()


def _gcide(root: Path) -> bytes:
    path = root / _GCIDE
    if not path.is_file():
        raise CorpusMissing(f"corpus `gcide` needs `{path}`, which is not installed",
                            "apt-get install dict-gcide")
    return gzip.decompress(path.read_bytes())  # .dz is gzip with an index


def _python_doc(root: Path) -> bytes:
    files = _each_once(root.glob(_DOC_GLOB))  # Debian links python3.11-doc/html to python3.11/html
    if not files:
        raise CorpusMissing(f"corpus `python-doc` needs `{root / _DOC_GLOB}`, which is not installed",
                            "apt-get install python3-doc")
    return b"\n".join(_checked(path) for path in files)


_READERS: dict[str, Callable[[Path], bytes]] = {
    "code": _stdlib_code, "reference": _language_reference, "gcide": _gcide, "python-doc": _python_doc}
_PACKAGES = {"dict-gcide": "gcide", "python3-doc": "python-doc"}

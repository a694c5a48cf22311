"""What step prints were made by: source files, packages, environment and arithmetic of one launch, as its first rank saw them.

`<launch>/prints.json` is written once, at the first step, by the process that trains. The source files are those that it has
imported, wherever they lie, and not those of a repository. Of other files these are noted, with what they hold: those that the
command line names, settings in the working directory, and what is mapped into memory (weights, tables). Other files are not
looked at. Of a large file its size and 64 blocks are noted. Of files and of variables of the environment only digests are kept;
what looks like a secret is left out. `changed_facts` says what is different in another launch. No torch here.
"""

import functools
import hashlib
import json
import math
import os
import re
import stat
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from chronicle.credentials import holds_secret, looks_secret
from chronicle.prints.ring import facts_path
from rollback.disk.durable import write_atomic

VERSION = 2
MOST_FILES, LARGEST_BYTES = 2000, 4 << 20
MOST_HERE, DEEPEST = 500, 3
BLOCKS, BLOCK_BYTES = 64, 16 << 10  # of a large file
SETTINGS = (".json", ".yaml", ".yml", ".toml", ".cfg", ".ini", ".conf", ".env", ".xml", ".sh", ".properties")
MOST_OF_SETTINGS = 64 << 10
PACKAGES = Path(__file__).resolve().parents[2]
OURS = (str(PACKAGES / "chronicle") + os.sep, str(PACKAGES / "rollback") + os.sep, str(PACKAGES / "chronicle_ml.py"))
TABLES = {
    "code": "code",
    "package": "packages",
    "library": "libraries",
    "environment": "environment",
    "arithmetic": "arithmetic",
    "file": "files",
}
# Shared libraries that compute, wherever they lie: their packages need not be imported, and the system's have no version here
COMPUTES = re.compile(
    r"lib(c|m|stdc\+\+|gcc_s|gomp|iomp5|mkl\w*|openblas\w*|blas\w*|torch\w*|c10\w*|cuda|cudart|cu(blas|dnn|fft|rand|solver|sparse)\w*"
    r"|nv\w*|nccl|rccl|hip\w*|roc\w*|amdhip\w*|gloo\w*|mpi\w*|fabric|ibverbs)[-.\d\w]*\.so[.\d]*"
)
OWN = ("chronicle", "rollback", "chronicle_ml")  # ours: another version of it is named by its own
# Variables that differ between two equal starts, and those that a replay sets itself.
NOT_COMPARED = re.compile(
    r"CHRONICLE_\w+|RANK|LOCAL_\w+|GROUP_\w+|ROLE_\w+|WORLD_SIZE|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+|TORCH_ELASTIC_\w+"
    r"|PET_SIGNALS_TO_HANDLE|NCCL_ASYNC_ERROR_HANDLING|TORCH_NCCL_ASYNC_ERROR_HANDLING|SLURM_\w+|PMI\w*|OMPI_\w+"
    r"|PWD|OLDPWD|SHLVL|_\w*|TERM\w*|COLUMNS|LINES|HOSTNAME|LOGNAME|USER|MAIL|SSH_\w+|XDG_\w+|DBUS_\w+|WINDOWID|DISPLAY"
    r"|INVOCATION_ID|JOURNAL_STREAM|LS_COLORS|LESS\w*|PS1|TMUX\w*|STY|TMPDIR|PYTHONBREAKPOINT|PYTHONDONTWRITEBYTECODE"
    r"|SRUN_LABELIO|PYTEST_\w+|KMP_\w+|WANDB_\w+|MLFLOW_\w+|COMET_\w+|NEPTUNE_\w+|CLEARML_\w+|TRACKIO_\w+|AIM_\w+"
)


class ChangedFact(NamedTuple):
    """One thing that is different: `kind` is one of `TABLES`, doubt, or recorder (another version of chronicle).

    A doubt may be without effect: a file that the launch itself may have written.
    """

    kind: str
    name: str
    before: str
    after: str

    @property
    def words(self) -> str:
        """In a few words; digests are not shown."""
        is_file = self.kind == "file" or (self.kind == "doubt" and self.name.startswith(os.sep))
        if is_file or self.kind in ("code", "environment", "library"):
            what = "is new" if not self.before else "is gone" if not self.after else "has changed"
            return f"variable `{self.name}` {what}" if self.kind == "environment" else f"`{self.name}` {what}"
        return f"{self.name}: {self.before or 'none'} → {self.after or 'none'}"


def write_facts(launch_dir: Path, arithmetic: Mapping[str, Any]) -> None:
    """Write what this process trains with. Raises OSError."""
    found = {
        "v": VERSION,
        "host": os.uname().nodename,
        "directory": os.getcwd(),
        "code": dict(_sources()),
        "files": dict(_files(launch_dir)),
        "packages": dict(_packages()),
        "libraries": dict(_libraries()),
        "environment": digests_of(_started_with()),
        "arithmetic": {name: str(value) for name, value in arithmetic.items()},
    }
    _write(launch_dir, found)


def _write(launch_dir: Path, facts: Mapping[str, Any]) -> None:
    write_atomic(facts_path(launch_dir), json.dumps(facts, indent=1, sort_keys=True) + "\n", durable=False)


def add_sources(launch_dir: Path) -> None:
    """At the end of the process: the sources that it imported after its first step. Raises OSError."""
    known = read_facts(launch_dir)
    if known is None:
        return
    code = {**dict(_sources()), **known["code"]}
    if code != known["code"]:
        _write(launch_dir, {**known, "code": code})


def read_facts(launch_dir: Path) -> Mapping[str, Any] | None:
    """The facts of a launch; None where there are none that this version understands."""
    try:
        found = json.loads(facts_path(launch_dir).read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("v") == VERSION else None


def changed_facts(before: Mapping[str, Any], after: Mapping[str, Any], ended: float | None) -> list[ChangedFact]:
    """What is different between two launches, code first. `ended`: when the first one was over, in seconds, if that is known.

    A source that the second one has not imported yet is compared as it lies; a package that is new is no difference, nor is a
    source that is older than the end of the first (a resume imports more). Of files see `_changed_file`.
    """
    found: list[ChangedFact] = []
    for kind, table in TABLES.items():
        one, other = before.get(table) or {}, after.get(table) or {}
        for name in sorted(one.keys() | other.keys()):
            a, b = str(one.get(name) or ""), str(other.get(name) or "")
            if kind == "code" and not b:
                b = _digest_of(name)  # it may be imported later than at the first step
            if a == b:
                continue
            if kind == "file":
                found += _changed_file(name, a, b, str(before.get("directory")), ended)
            elif (a and b) or kind == "environment" or (kind == "code" and _is_gone_or_later(name, a, ended)):
                is_ours = kind == "package" and name in OWN  # no part of a step is ours: evidence, and no cause
                found.append(ChangedFact("recorder" if is_ours else kind, name, a, b))
    return found


def _changed_file(name: str, before: str, after: str, directory: str, ended: float | None) -> Iterator[ChangedFact]:
    """A file that holds something else; a doubt where the launch may have written it itself.

    What the second one alone names is no difference. What is gone counts in the working directory alone: elsewhere are caches.
    """
    if not after and name.startswith(directory + os.sep) and not os.path.exists(name):
        yield ChangedFact("file", name, before, after)
    if not before or not after:
        return
    is_same_sample = "~" in before and before.partition("~")[0] == after.partition("~")[0]
    yield ChangedFact("doubt" if is_same_sample or not _is_later(name, ended) else "file", name, before, after)


def _is_gone_or_later(name: str, before: str, ended: float | None) -> bool:
    return not os.path.exists(name) if before else _is_later(name, ended)


def holds_data(fact: ChangedFact) -> bool:
    """Whether a file that changed is none of settings, by its ending; a large one of JSON or XML is none either."""
    if fact.kind != "file" or fact.name.endswith(".py"):
        return False
    suffix = os.path.splitext(fact.name)[1].lower()
    try:
        is_large = os.path.getsize(fact.name) > MOST_OF_SETTINGS
    except OSError:
        is_large = False
    return suffix not in SETTINGS or (suffix in (".json", ".xml") and is_large)


def _sources() -> Iterator[tuple[str, str]]:
    """Path and digest of every source file that this process imported and that no installed package owns."""
    library = tuple({_real_directory(path) + os.sep for path in places_of_installed()})
    count = 0
    for name, module in sorted(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if not isinstance(path, str) or not path.endswith(".py") or name.partition(".")[0] in OWN:
            continue
        real = _real(path)
        if real.startswith(library) or real.startswith(OURS) or count >= MOST_FILES:
            continue
        try:
            if os.path.getsize(real) <= LARGEST_BYTES:
                yield os.path.abspath(path), hashlib.sha256(Path(real).read_bytes()).hexdigest()[:16]
                count += 1
        except OSError:
            continue


def _files(launch_dir: Path) -> Iterator[tuple[str, str]]:
    """Path and digest of the files that this process is known to depend on.

    Without those that it has written itself, installed packages, the machine's own files, the user's hidden directories
    (settings and caches of tools), the run's files and its checkpoints: a resume reads other ones.
    """
    outside = _outside(launch_dir)
    began: float = getattr(sys, "_chronicle_began", math.inf)
    for path in sorted({*_named(), *_mapped(), *_settings_here()})[:MOST_FILES]:
        if not is_outside(path, outside) and _is_older(path, began) and (digest := _digest_of(path)):
            yield path, digest


def _named() -> Iterator[str]:
    """Files that the command line names: `data.bin`, `--data=data.bin`."""
    for word in sys.argv[1:]:
        path = os.path.abspath(word.partition("=")[2] or word)
        if os.path.isfile(path):
            yield path


def _settings_here() -> Iterator[str]:
    """Files of settings in the working directory and a few levels below it."""
    count = 0
    top = os.getcwd()
    for directory, below, names in os.walk(top):
        depth = directory[len(top) :].count(os.sep)
        below[:] = sorted(name for name in below if depth < DEEPEST - 1 and not name.startswith((".", "_")))
        for name in sorted(names):
            count += 1
            if count > MOST_HERE:
                return
            if name.lower().endswith(SETTINGS):
                yield os.path.join(directory, name)


def _mapped() -> Iterator[str]:
    """Files that are mapped into memory now and hold no code: safetensors and `memmap` are opened by libraries in C."""
    maps = _maps()
    yield from (path for path, is_code in maps.items() if not is_code and not path.endswith((" (deleted)", ".so", ".pyc")))


def _maps() -> dict[str, bool]:
    """The files that are mapped into memory now, and whether each holds code."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as table:
            rows = [line.rstrip("\n").split(maxsplit=5) for line in table]
    except OSError:
        return {}
    paths: dict[str, bool] = {}
    for row in rows:
        if len(row) == 6 and row[5].startswith("/"):
            paths[row[5]] = paths.get(row[5], False) or "x" in row[1]
    return paths


def _libraries() -> Iterator[tuple[str, str]]:
    """Name and digest of the mapped libraries that compute: the system's, the driver's, those of packages."""
    for path, is_code in sorted(_maps().items()):
        name = os.path.basename(path)
        if is_code and COMPUTES.fullmatch(name) and (digest := _digest_of(path)):
            yield name, digest.partition("~")[0]


def _outside(launch_dir: Path) -> tuple[str, ...]:
    own = [str(launch_dir.parent.parent)]
    own += [place for name in ("CHRONICLE_CHECKPOINTS", "CHRONICLE_RESUME_FROM") if (place := os.environ.get(name))]
    places = ("/dev", "/proc", "/sys", "/etc", "/usr", "/lib", *places_of_installed(), sys.prefix, *own)
    return tuple(_real_directory(os.path.abspath(path)) + os.sep for path in places)


def is_outside(path: str, outside: tuple[str, ...]) -> bool:
    """Whether a file lies in one of these places, among the user's settings, or is ours."""
    real = _real(path)
    return real.startswith((os.path.expanduser("~/."), *OURS)) or (real + os.sep).startswith(outside)


def _real(path: str) -> str:
    """`os.path.realpath`, with one look a file: thousands lie in the same directories."""
    directory, name = os.path.split(os.path.abspath(path))
    joined = os.path.join(_real_directory(directory), name)
    try:
        is_link = stat.S_ISLNK(os.lstat(joined).st_mode)
    except OSError:
        return joined
    return os.path.realpath(joined) if is_link else joined


@functools.lru_cache(maxsize=4096)
def _real_directory(directory: str) -> str:
    """A directory without links."""
    return os.path.realpath(directory)


def _is_later(path: str, ended: float | None) -> bool:
    return ended is not None and not _is_older(path, ended)


def _is_older(path: str, moment: float) -> bool:
    try:
        return os.stat(path).st_ctime < moment
    except OSError:
        return False


def _digest_of(path: str) -> str:
    """A digest of the file, "" where it is none; of a large one `~<time of change>` follows that of its size and blocks."""
    try:
        if not os.path.isfile(path):
            return ""
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            if found.st_size <= LARGEST_BYTES:
                return hashlib.sha256(file.read()).hexdigest()[:16]
            digest = hashlib.sha256(str(found.st_size).encode())
            for number in range(BLOCKS):
                file.seek(number * (found.st_size - BLOCK_BYTES) // (BLOCKS - 1))
                digest.update(file.read(BLOCK_BYTES))
            return f"{digest.hexdigest()[:16]}~{found.st_mtime_ns}"
    except OSError:
        return ""


def _packages() -> Iterator[tuple[str, str]]:
    """Name and version of every imported package that tells its version, Python first."""
    yield "python", sys.version.split()[0]
    for name, module in sorted(sys.modules.items()):
        version = None if "." in name else vars(module).get("__version__") if hasattr(module, "__dict__") else None
        if isinstance(version, str) and not name.startswith("_"):
            yield name, version


def _started_with() -> Mapping[str, str]:
    """The variables that this process was started with: libraries set more (a directory of this process, a port)."""
    try:
        rows = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return os.environ
    return dict(os.fsdecode(row).split("=", 1) for row in rows if b"=" in row) or os.environ


def digests_of(environ: Mapping[str, str]) -> dict[str, str]:
    """Name and digest of the variables that are compared."""
    found = {}
    for name, value in sorted(environ.items()):
        if NOT_COMPARED.fullmatch(name) or looks_secret(name) or holds_secret(value):
            continue
        found[name] = hashlib.sha256(f"{name}={value}".encode("utf-8", "surrogateescape")).hexdigest()[:8]
    return found


def places_of_installed() -> Iterator[str]:
    """The directories of the standard library and of installed packages."""
    for name in ("stdlib", "platstdlib", "purelib", "platlib"):
        if path := sysconfig.get_paths().get(name):
            yield path
    yield from (path for path in sys.path if path.rstrip("/").endswith(("site-packages", "dist-packages")))

"""What step prints were made by: source files, packages, environment and arithmetic of one launch, as its first rank saw them.

`<launch>/prints.json` is written once, at the first step, by the process that trains: the source files are those that it has
imported, wherever they lie, and not those of a repository. Files that it only read before (configurations, tables, small data)
are noted, too; of a large one (a teacher's weights) the size and 64 blocks. What it reads later, and what changes meanwhile, is
noted at the step that follows (`LateFiles`): settings that are read at every step, a file that somebody laid there and took
away. Of files and of variables of the environment only digests are kept;
what looks like a secret is left out. `changed_facts` says what is different in another launch. No torch here.
"""

import ctypes
import functools
import hashlib
import json
import locale
import os
import re
import resource
import stat
import struct
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from chronicle.credentials import holds_secret, looks_secret
from chronicle.resume.ring import facts_path
from rollback.disk.durable import write_atomic

__all__ = [
    "ITS_OWN",
    "ChangedFact",
    "LateFiles",
    "born",
    "changed_facts",
    "holds_data",
    "is_outside",
    "new_files",
    "new_sources",
    "read_facts",
    "stop_noting",
    "write_facts",
]

VERSION = 1
MOST_FILES, LARGEST_BYTES = 2000, 4 << 20
MOST_LATE, MOST_ROWS = 64, 256
MOST_OPENED = 5000  # between two steps, as in `launch/startup/sitecustomize.py`
BLOCKS, BLOCK_BYTES = 64, 16 << 10  # of a large file
ITS_OWN = "its own"
SETTINGS = (".json", ".yaml", ".yml", ".toml", ".cfg", ".ini", ".conf", ".env", ".xml", ".sh", ".properties")
MOST_OF_SETTINGS = 64 << 10
AT_FDCWD, BIRTH = -100, 0x800
MEANWHILE = "changed while it ran, about step"
PACKAGES = Path(__file__).resolve().parents[2]
OURS = (str(PACKAGES / "chronicle") + os.sep, str(PACKAGES / "rollback") + os.sep, str(PACKAGES / "chronicle_ml.py"))
TABLES = {"code": "code", "package": "packages", "environment": "environment", "arithmetic": "arithmetic", "file": "files"}
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
    """One thing that is different: `kind` is code, package, environment, arithmetic, file, doubt or recorder (chronicle)."""

    kind: str
    name: str
    before: str
    after: str

    @property
    def words(self) -> str:
        """In a few words; digests are not shown."""
        if self.kind == "doubt" and not self.name.startswith(os.sep) and self.after:
            return f"{self.name}: {self.before} → {self.after}"
        if self.kind == "doubt":
            return f"`{self.name}` was written anew" if self.after else f"`{self.name}`: {self.before}, and not in the replay"
        if self.kind == "file" and self.after.startswith(MEANWHILE):
            return f"`{self.name}`, which the launch read, {self.after}"
        if self.kind == "file" and not self.before:
            return f"`{self.name}` came after the launch, and is read"
        if self.kind == "file":
            return f"`{self.name}`, which the launch read, {'has changed' if self.after else 'is gone'}"
        if self.kind in ("code", "environment"):
            what = "is new" if not self.before else "is gone" if not self.after else "has changed"
            return f"`{self.name}` {what}" if self.kind == "code" else f"variable `{self.name}` {what}"
        return f"{self.name}: {self.before or 'none'} → {self.after or 'none'}"


def write_facts(launch_dir: Path, arithmetic: Mapping[str, Any]) -> dict[str, Any]:
    """Write what this process trains with, and return it. Raises OSError."""
    opened = stop_noting()
    found = {
        "v": VERSION,
        "host": os.uname().nodename,
        "directory": os.getcwd(),
        "code": dict(_sources()),
        "files": dict(_files(launch_dir, opened)),
        "written": list(_written(launch_dir, opened))[:MOST_ROWS],
        "around": _around(),
        "machine": dict(_machine()),
        "packages": dict(_packages()),
        "environment": dict(_environment(_started_with())),
        "arithmetic": {name: str(value) for name, value in arithmetic.items()},
    }
    _write(launch_dir, found)
    return found


def _write(launch_dir: Path, found: Mapping[str, Any]) -> None:
    write_atomic(facts_path(launch_dir), json.dumps(found, indent=1, sort_keys=True) + "\n", durable=False)


class LateFiles:
    """What a launch reads after its first step: `facts["later"]` holds rows of path, step and digest ("": it was gone by then).

    A file is looked at when the step after its opening begins, a known one only where size or times are others. One that the
    launch wrote itself has the digest `ITS_OWN`. At most `MOST_LATE` paths of each kind, and `MOST_ROWS` rows (a file that is
    new at every step). Of files that are older than the process (data that is read file by file) no more are needed: a replay
    knows them by their age.
    """

    def __init__(self, launch_dir: Path, facts: dict[str, Any]) -> None:
        self._launch_dir, self._facts = launch_dir, facts
        self._outside = _outside(launch_dir)
        self._known: dict[str, tuple[object, str]] = {path: (_stamp(path), digest) for path, digest in facts["files"].items()}
        self._began: float = getattr(sys, "_chronicle_began", 0.0)
        self._num = self._num_old = self._num_own = 0
        self.opened: dict[str, bool] = {}  # path and whether for writing, since the step before; `sitecustomize.py` fills it
        sys._chronicle_opened = self.opened  # type: ignore[attr-defined]

    def stepping(self, step: int) -> None:
        """Look at what was opened since the step before. Raises OSError."""
        opened = [self.opened.popitem() for _ in range(len(self.opened))][::-1]
        if not opened:
            return
        rows = [row for path, written in opened if (row := self._row(path, written, step)) is not None]
        if rows:
            self._facts.setdefault("later", []).extend(rows)
            _write(self._launch_dir, self._facts)
        is_full = len(opened) >= MOST_OPENED  # what came after these is not among them
        if is_full or self._num > MOST_LATE or len(self._facts.get("later", ())) >= MOST_ROWS:
            self._facts["unnoted"] = step  # from here on
            _write(self._launch_dir, self._facts)
            stop_noting()
            self.opened = {}

    def network(self, name: str) -> None:
        """A network of this class, which is no part of the models, is called. Raises OSError."""
        known = self._facts.setdefault("networks", [])
        if name not in known:
            known.append(name)
            _write(self._launch_dir, self._facts)

    def _row(self, path: str, written: bool, step: int) -> list[Any] | None:
        if is_outside(path, self._outside):
            return None
        stamp, digest = self._known.get(path, (None, None))
        if digest == ITS_OWN:
            return None
        now = None if written else _stamp(path)
        if digest is not None and stamp == now:
            return None
        is_first = digest is None and not written
        is_old = is_first and _is_older(path, self._began)
        if (self._num_own if written else self._num_old if is_old else 0) >= MOST_LATE:
            return None
        new = ITS_OWN if written else _digest_of(path)
        self._known[path] = now, new
        self._num += is_first and not is_old
        self._num_old += is_old
        self._num_own += written
        return None if new == digest else [path, step, new]


def read_facts(launch_dir: Path) -> Mapping[str, Any] | None:
    """The facts of a launch; None where there are none that this version understands."""
    try:
        found = json.loads(facts_path(launch_dir).read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("v") == VERSION else None


def changed_facts(before: Mapping[str, Any], after: Mapping[str, Any], until: int | None = None) -> list[ChangedFact]:
    """What is different between two launches, code first. A file that only one of them had imported or read is no difference,
    unless it is gone (of what was read: from the launch's working directory; elsewhere are caches). What was read first after
    step `until` does not count. Kind `doubt`: a large file whose blocks are equal was written anew.
    """
    found: list[ChangedFact] = []
    here = str(before.get("directory")) + os.sep
    for kind, table in TABLES.items():
        one, other = before.get(table) or {}, after.get(table) or {}
        for name in sorted(one.keys() | other.keys()):
            a, b = str(one.get(name) or ""), str(other.get(name) or "")
            both = bool(a and b) or kind == "environment"
            gone = a and not os.path.exists(name) and (kind == "code" or (kind == "file" and name.startswith(here)))
            if a != b and (both or gone):
                found.append(ChangedFact(_kind_of(kind, a, b, name), name, a, b))
    one, other = before.get("machine") or {}, after.get("machine") or {}
    told = sorted(one.keys() & other.keys())
    found += [ChangedFact("doubt", name, one[name], other[name]) for name in told if one[name] != other[name]]
    return [*found, *_changed_later(before, after, until, here)]


def new_files(before: Mapping[str, Any], after: Mapping[str, Any], until: int, ended: float | None) -> list[ChangedFact]:
    """Files of the working directory that only the replay has read, up to step `until`, and that came after the launch.

    A setting of one's own that is read where it is there. `ended`: in seconds. What was there before, under any name, and what
    came as another checkpoint does, is older; where the filesystem does not tell when a file was made, nothing is said.
    """
    here = str(before.get("directory")) + os.sep
    if ended is None or before.get("unnoted") is not None:
        return []
    known = {*(before.get("files") or {}), *(before.get("written") or ()), *(path for path, _, _ in before.get("later") or ())}
    read = dict(after.get("files") or {})
    read |= {path: digest for path, step, digest in after.get("later") or () if step <= until and digest not in ("", ITS_OWN)}
    names = sorted(path for path in read.keys() - known - (after.get("code") or {}).keys() if path.startswith(here))
    return [ChangedFact("file", path, "", read[path]) for path in names if (made := born(path)) and made > ended * 1e9]


def new_sources(before: Mapping[str, Any], after: Mapping[str, Any], ended: float | None) -> list[ChangedFact]:
    """Source files that only the replay has imported and that came, or were changed, after the launch had ended (seconds).

    A file that hides a package is one; what a resume alone imports is older, and what the launch made for itself as well.
    """
    if ended is None:
        return []
    names = sorted((after.get("code") or {}).keys() - (before.get("code") or {}).keys())
    return [ChangedFact("code", name, "", after["code"][name]) for name in names if not _is_older(name, ended)]


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


def _kind_of(kind: str, a: str, b: str, name: str = "") -> str:
    if kind == "package" and name in OWN:
        return "recorder"  # no part of a step is ours: evidence, and no cause
    return "doubt" if "~" in a and a.partition("~")[0] == b.partition("~")[0] else kind


def _changed_later(
    before: Mapping[str, Any], after: Mapping[str, Any], until: int | None, here: str
) -> Iterator[ChangedFact]:
    """Files that the launch read after its first step: others than in the replay, changed while it ran, or gone by now.

    They are looked at when a step begins, so what bears the number of the step after `until` may have been opened in either:
    a doubt.
    """
    last = float("inf") if until is None else until
    theirs = {str(path): str(digest) for path, digest in (after.get("files") or {}).items()}
    theirs |= {str(path): str(digest) for path, _, digest in after.get("later") or ()}
    known = {str(path): str(digest) for path, digest in (before.get("files") or {}).items()}
    found: dict[str, ChangedFact] = {}
    for path, step, digest in before.get("later") or ():
        if step > last + 1 or path.endswith("__path_hook__"):  # a name in `sys.path`, of records that noted it
            continue
        earlier, known[path] = known.get(path), digest
        now, own = theirs.get(path), ITS_OWN in (digest, earlier)
        if earlier and digest and not own and _kind_of("file", earlier, digest) == "file":
            found[path] = ChangedFact("file", path, earlier, f"{MEANWHILE} {step}")
        elif own or not digest:
            is_there = os.path.exists(path) if own else os.path.isdir(path)  # an output, or no file at all
            if now is None and path.startswith(here) and not is_there:
                found[path] = ChangedFact("doubt", path, f"opened at step {step}", "")
        elif now is not None and now != digest:
            found[path] = ChangedFact(_kind_of("file", digest, now), path, digest, now)
        if step > last and path in found:
            found[path] = found[path]._replace(kind="doubt")
    yield from found.values()
    if (unnoted := before.get("unnoted")) is not None and unnoted <= last:
        yield ChangedFact("doubt", "files", f"what was read from step {unnoted} on was not noted: it was too much", "")


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


def stop_noting() -> dict[str, bool]:
    """The paths that this process opened so far, and whether for writing; `startup/sitecustomize.py` notes no more."""
    opened: dict[str, bool] = getattr(sys, "_chronicle_opened", None) or {}
    sys._chronicle_opened = None  # type: ignore[attr-defined]
    return opened


def _files(launch_dir: Path, opened: Mapping[str, bool]) -> Iterator[tuple[str, str]]:
    """Path and digest of every file that this process has read so far or has mapped, and not opened for writing.

    Without installed packages, the machine's own files, the user's hidden directories (settings and caches of tools), the
    run's files and its checkpoints: a resume reads other ones.
    """
    outside = _outside(launch_dir)
    count = 0
    for path, digest in sorted(getattr(sys, "_chronicle_replaced", {}).items()):  # as it was read, before it was written
        if not is_outside(path, outside):
            yield path, digest
    for path, written in sorted({**dict.fromkeys(_mapped(), False), **opened}.items()):
        if written or is_outside(path, outside) or count >= MOST_FILES:
            continue
        if digest := _digest_of(path):
            yield path, digest
            count += 1


def _written(launch_dir: Path, opened: Mapping[str, bool]) -> Iterator[str]:
    """The files that this process has opened for writing so far, where others are compared."""
    outside = _outside(launch_dir)
    yield from (path for path, written in sorted(opened.items()) if written and not is_outside(path, outside))


def _around() -> dict[str, Any]:
    """The names in the working directory when the process began: a replay from there hides what came later."""
    directory, names = getattr(sys, "_chronicle_around", None) or (None, None)
    if names is None or directory != os.getcwd():
        return {}
    return {"directory": os.path.realpath(directory), "names": sorted(names)}


def _mapped() -> Iterator[str]:
    """Files that are mapped into memory now and hold no code: safetensors and `memmap` are opened by libraries in C."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as table:
            rows = [line.rstrip("\n").split(maxsplit=5) for line in table]
    except OSError:
        return
    paths = {row[5]: "x" in row[1] for row in rows if len(row) == 6 and row[5].startswith("/")}
    for row in rows:
        if len(row) == 6 and "x" in row[1]:
            paths[row[5]] = True
    yield from (path for path, is_code in paths.items() if not is_code and not path.endswith((" (deleted)", ".so", ".pyc")))


def _machine() -> Iterator[tuple[str, str]]:
    """What the system gives to this process, and a script may go by."""
    yield "processors", str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
    yield "time zone", "/".join(time.tzname)
    yield "locale", locale.setlocale(locale.LC_ALL)
    names = ("RLIMIT_AS", "RLIMIT_DATA", "RLIMIT_NOFILE", "RLIMIT_NPROC", "RLIMIT_STACK")
    yield "limits", " ".join(f"{name[7:].lower()} {resource.getrlimit(getattr(resource, name))[0]}" for name in names)


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


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns, found.st_ino


def _is_older(path: str, moment: float) -> bool:
    try:
        return os.stat(path).st_ctime < moment
    except OSError:
        return False


def born(path: str) -> int | None:
    """When a file or directory was made, in ns (`statx`); None where the filesystem does not tell."""
    found = ctypes.create_string_buffer(256)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.statx(AT_FDCWD, os.fsencode(path), 0, BIRTH, found) != 0:
        return None
    if not struct.unpack_from("I", found)[0] & BIRTH:
        return None
    seconds, nanoseconds = struct.unpack_from("qI", found, 80)
    return int(seconds) * 10**9 + int(nanoseconds)


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


def _environment(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Name and digest of the variables that are compared."""
    for name, value in sorted(environ.items()):
        if NOT_COMPARED.fullmatch(name) or name.startswith("CHRONICLE_"):
            continue
        if looks_secret(name) or holds_secret(value):
            continue
        yield name, hashlib.sha256(f"{name}={value}".encode("utf-8", "surrogateescape")).hexdigest()[:8]


def places_of_installed() -> Iterator[str]:
    """The directories of the standard library and of installed packages."""
    for name in ("stdlib", "platstdlib", "purelib", "platlib"):
        if path := sysconfig.get_paths().get(name):
            yield path
    yield from (path for path in sys.path if path.rstrip("/").endswith(("site-packages", "dist-packages")))

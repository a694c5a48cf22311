"""What step prints were made by: source files, packages, environment and arithmetic of one launch, as its first rank saw them.

`<launch>/prints.json` is written once, at the first step, by the process that trains: the source files are those that it has
imported, wherever they lie, and not those of a repository. Files that it only read before (configurations, tables, small data)
are noted, too. Of files and of variables of the environment only digests are kept;
what looks like a secret is left out. `changed` says what is different in another launch. No torch here.
"""

import hashlib
import json
import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from chronicle.credentials import holds_secret, looks_secret
from chronicle.replay.ring import facts_path
from rollback.disk.durable import write_atomic

__all__ = ["NOT_COMPARED", "ChangedFact", "changed_facts", "read_facts", "stop_noting", "write_facts"]

VERSION = 1
MOST_FILES, LARGEST_BYTES = 2000, 4 << 20
OURS = str(Path(__file__).resolve().parent.parent) + os.sep
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
    """One thing that is different: `kind` is code, package, environment, arithmetic or file."""

    kind: str
    name: str
    before: str
    after: str

    @property
    def words(self) -> str:
        """In a few words; digests are not shown."""
        if self.kind == "file":
            return f"`{self.name}`, which the launch read, {'has changed' if self.after else 'is gone'}"
        if self.kind in ("code", "environment"):
            what = "is new" if not self.before else "is gone" if not self.after else "has changed"
            return f"`{self.name}` {what}" if self.kind == "code" else f"variable `{self.name}` {what}"
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
        "environment": dict(_environment(os.environ)),
        "arithmetic": {name: str(value) for name, value in arithmetic.items()},
    }
    write_atomic(facts_path(launch_dir), json.dumps(found, indent=1, sort_keys=True) + "\n", durable=False)


def read_facts(launch_dir: Path) -> Mapping[str, Any] | None:
    """The facts of a launch; None where there are none that this version understands."""
    try:
        found = json.loads(facts_path(launch_dir).read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("v") == VERSION else None


def changed_facts(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[ChangedFact]:
    """What is different between two launches, code first. A file that only one of them had imported or read is no difference,
    unless it is gone (of what was read: from the launch's working directory; elsewhere are caches).
    """
    found: list[ChangedFact] = []
    here = str(before.get("directory")) + os.sep
    for kind, table in TABLES.items():
        one, other = before.get(table) or {}, after.get(table) or {}
        for name in sorted(one.keys() | other.keys()):
            a, b = str(one.get(name) or ""), str(other.get(name) or "")
            both = bool(a and b) or kind in ("environment", "arithmetic")
            gone = a and not os.path.exists(name) and (kind == "code" or (kind == "file" and name.startswith(here)))
            if a != b and (both or gone):
                found.append(ChangedFact(kind, name, a, b))
    return found


def _sources() -> Iterator[tuple[str, str]]:
    """Path and digest of every source file that this process imported and that no installed package owns."""
    library = tuple({os.path.realpath(path) + os.sep for path in _installed()})
    count = 0
    for name, module in sorted(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if not isinstance(path, str) or not path.endswith(".py") or name.partition(".")[0] in OWN:
            continue
        real = os.path.realpath(path)
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


def _files(launch_dir: Path) -> Iterator[tuple[str, str]]:
    """Path and digest of every small file that this process has read so far, and not opened for writing.

    Without installed packages, the machine's own files, the user's hidden directories (settings and caches of tools), the
    run's files and its checkpoints: a resume reads other ones.
    """
    opened = stop_noting()
    not_its_own = ["/proc", "/sys", "/dev", "/etc", "/usr", "/lib", *_installed(), sys.prefix, str(launch_dir.parent.parent)]
    not_its_own += [place for name in ("CHRONICLE_CHECKPOINTS", "CHRONICLE_RESUME_FROM") if (place := os.environ.get(name))]
    outside = tuple(os.path.realpath(path) + os.sep for path in not_its_own)
    count = 0
    for path, written in sorted(opened.items()):
        real = os.path.realpath(path)
        hidden = real.startswith(os.path.expanduser("~/."))
        if written or hidden or (real + os.sep).startswith(outside) or real.startswith(OURS) or count >= MOST_FILES:
            continue
        try:
            if os.path.isfile(real) and os.path.getsize(real) <= LARGEST_BYTES:
                yield path, hashlib.sha256(Path(real).read_bytes()).hexdigest()[:16]
                count += 1
        except OSError:
            continue


def _installed() -> Iterator[str]:
    for name in ("stdlib", "platstdlib", "purelib", "platlib"):
        if path := sysconfig.get_paths().get(name):
            yield path
    yield from (path for path in sys.path if path.rstrip("/").endswith(("site-packages", "dist-packages")))


def _packages() -> Iterator[tuple[str, str]]:
    """Name and version of every imported package that tells its version, Python first."""
    yield "python", sys.version.split()[0]
    for name, module in sorted(sys.modules.items()):
        version = None if "." in name else vars(module).get("__version__") if hasattr(module, "__dict__") else None
        if isinstance(version, str) and not name.startswith("_"):
            yield name, version


def _environment(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name, value in sorted(environ.items()):
        if NOT_COMPARED.fullmatch(name) or looks_secret(name) or holds_secret(value):
            continue
        yield name, hashlib.sha256(f"{name}={value}".encode("utf-8", "surrogateescape")).hexdigest()[:8]

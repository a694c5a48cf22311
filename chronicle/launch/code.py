"""The code that a launch runs: the commit, and what differs from it as one patch, so that it can be run again.

The patch holds tracked changes and new source files; `git apply` makes them again on the commit. It is made with an index and
an object directory of its own: nothing is written into the user's repository, and no lock is taken. Strings that look like
passwords or keys read `***` in it; it then says that it is not complete. `CHRONICLE_CODE=off` keeps no patch. Nothing here
raises: what cannot be had is None, with the reason.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from chronicle.credentials import redact_source

GIT_SECONDS = 10.0
SOURCE_SUFFIXES = (".py", ".pyx", ".sh", ".sbatch", ".toml", ".yaml", ".yml", ".cu", ".cpp", ".c", ".h")
MOST_SOURCES = 2000
LARGEST_SOURCE_BYTES = 1 << 20
MOST_PATCH_BYTES = 1 << 20
CODE_VARIABLE = "CHRONICLE_CODE"
FROM_STDIN = ("--pathspec-from-file=-", "--pathspec-file-nul")
PLAIN_DIFF = ("--binary", "--full-index", "--no-color", "--no-ext-diff", "--no-textconv")


class CodeState(NamedTuple):
    """What `git` says of a directory. `commit` None: no repository, or no git. `digest` None: no changes.

    `patch` None: there are no changes, or `why` says why it is not kept. `hidden`: secrets in it are masked.
    """

    commit: str | None = None
    digest: str | None = None
    patch: bytes | None = None
    why: str = ""
    hidden: bool = False


def read_code(cwd: Path, *, with_patch: bool = True) -> CodeState:
    """The commit of the repository around `cwd`, a digest of the changes to it, and the changes as a patch."""
    commit = _git(cwd, "rev-parse", "HEAD")
    if commit is None:
        return CodeState()
    name = commit.decode("ascii", "replace").strip()
    changed = _git(cwd, "status", "--porcelain=v1", "--untracked-files=normal")
    if not changed:
        return CodeState(name, None, None, "" if changed is not None else "git did not answer")
    sources = _untracked_sources(cwd)
    digest = hashlib.sha256(changed + b"\0" + (_git(cwd, "diff", "HEAD", "--binary") or b""))
    for path in sources:
        try:
            digest.update(os.fsencode(path) + b"\0" + path.read_bytes())
        except OSError:
            digest.update(os.fsencode(path) + b"\0unreadable")
    state = CodeState(name, digest.hexdigest())
    return _with_patch(state, cwd, sources) if with_patch else state


def _with_patch(state: CodeState, cwd: Path, sources: list[Path]) -> CodeState:
    patch = _patch(cwd, sources)
    if patch is None:
        return state._replace(why="git did not answer")
    if len(patch) > MOST_PATCH_BYTES:
        return state._replace(why=f"the patch has {len(patch) / 1e6:.1f} MB, more than {MOST_PATCH_BYTES / 1e6:.0f} MB")
    if not patch:
        return state._replace(why="only files that are no source are new")
    text = patch.decode("utf-8", "surrogateescape")
    shown = redact_source(text)
    return state._replace(patch=shown.encode("utf-8", "surrogateescape"), hidden=shown != text)


def _patch(cwd: Path, sources: list[Path]) -> bytes | None:
    """Changes and new sources against HEAD, made with an index of its own."""
    found = _git(cwd, "rev-parse", "--git-path", "index", "--git-path", "objects")
    if found is None:
        return None
    index, objects = (cwd / os.fsdecode(line) for line in found.splitlines())
    with tempfile.TemporaryDirectory(prefix="chronicle-code-") as room:
        own = {
            "GIT_INDEX_FILE": os.path.join(room, "index"),
            "GIT_OBJECT_DIRECTORY": room,
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": str(objects.absolute()),
        }
        try:
            shutil.copy2(index, own["GIT_INDEX_FILE"])  # with its time: git tells by it which files it has to look at again
        except OSError:
            return None
        if sources:
            listed = b"\0".join(os.fsencode(path.relative_to(cwd)) for path in sources)
            if _git(cwd, "add", "--intent-to-add", *FROM_STDIN, environ=own, given=listed) is None:
                return None
        return _git(cwd, "diff", "HEAD", *PLAIN_DIFF, environ=own)


def files_of(patch: bytes) -> dict[str, str]:
    """File -> digest of its part of the patch."""
    found: dict[str, str] = {}
    for part in (b"\n" + patch).split(b"\ndiff --git ")[1:]:
        head = part.split(b"\n", 1)[0].decode("utf-8", "replace")
        found[head.rpartition(" b/")[2].strip('"')] = hashlib.sha256(part.rstrip(b"\n")).hexdigest()
    return found


def _untracked_sources(cwd: Path) -> list[Path]:
    """Untracked source files below `cwd`: `git diff` omits them, but the launch may run them."""
    listed = _git(cwd, "ls-files", "--others", "--exclude-standard", "-z") or b""
    paths = (cwd / os.fsdecode(name) for name in listed.split(b"\0") if name)
    sources = sorted(path for path in paths if path.suffix in SOURCE_SUFFIXES)[:MOST_SOURCES]
    return [path for path in sources if path.is_file() and path.stat().st_size <= LARGEST_SOURCE_BYTES]


def _git(cwd: Path, *words: str, environ: dict[str, str] | None = None, given: bytes | None = None) -> bytes | None:
    # GIT_OPTIONAL_LOCKS=0: reading the status must not lock the index while somebody commits
    whole = dict(os.environ, GIT_OPTIONAL_LOCKS="0", LC_ALL="C") | (environ or {})
    try:
        done = subprocess.run(
            ["git", "-C", str(cwd), *words], capture_output=True, timeout=GIT_SECONDS, check=False, env=whole, input=given
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None

"""The identity and location of a run, and whether this directory is the run, the moved run, or a copy of it.

`run.json` in the run directory holds the run's id and where that directory was when it was last written to: host, path,
inodes. Inodes survive `mv`, bind mounts, other mount points and symbolic links, and no copy has them. So a copy is
recognised before anything is written into it. A moved run is not asked about.

Paths below one of the run's anchors are kept relative to it in the journal (`@checkpoints/opt_step-20`), so that they stay
true after a move. The anchors' absolute paths stand in `run.json` and in the `run.place` entries, as a remark.

Every writing command imports this module. Its values are named tuples, which are made faster than dataclasses.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from chronicle.errors import JournalError, RunCopied
from chronicle.journal.events import NOTHING, EntryKind
from chronicle.paths import RunPaths

VERSION = 1
NAMES_RUN = frozenset(
    (EntryKind.RUN_INIT, EntryKind.RUN_PLACE, EntryKind.RUN_FORK, EntryKind.LAUNCH_START, EntryKind.GUARD_ATTACHED)
)
RUN, CHECKPOINTS, ABANDONED, PROJECT = "@run", "@checkpoints", "@abandoned", "@project"


class Standing(StrEnum):
    """What a run directory is, compared with what its `run.json` says."""

    HERE = "here"
    MOVED = "moved"  # the same directory under another path
    COPIED = "copied"  # the first one still lies at its recorded path
    UNCERTAIN = "uncertain"  # other inodes, and the first one is not to be seen: moved across filesystems, or copied


class Parent(NamedTuple):
    """The run that a fork began from."""

    run_id: str
    run: str
    step: int | None = None
    launch: int | None = None
    path: str = ""  # its run directory when the fork was made: a remark
    last_launch: int | None = None  # the newest launch in the journal that was copied: none of its numbers is used again
    shared: tuple[str, ...] = ()  # its checkpoint roots that were not copied with it: links, or paths outside what was copied

    def to_json(self) -> dict[str, Any]:
        """The form in `run.json` and in the `run.fork` entry."""
        record = self._asdict()
        if not self.shared:
            del record["shared"]
        return record

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "Parent":
        """Parse the persisted form."""
        return cls(
            run_id=str(record["run_id"]),
            run=str(record.get("run") or ""),
            step=record.get("step"),
            launch=record.get("launch"),
            path=str(record.get("path") or ""),
            last_launch=record.get("last_launch"),
            shared=tuple(str(root) for root in record.get("shared") or ()),
        )


class Anchors(NamedTuple):
    """The directories that stored paths are relative to, as absolute paths."""

    run: str
    roots: tuple[str, ...] = ()  # checkpoint roots, in the order in which the run came to know them

    @property
    def _places(self) -> tuple[tuple[str, str], ...]:
        """(name, directory), the deepest directory first."""
        found = [(RUN, self.run)]
        for number, root in enumerate(self.roots, start=1):
            suffix = "" if number == 1 else f"-{number}"
            found.append((CHECKPOINTS + suffix, root))
            found.append((ABANDONED + suffix, os.path.join(os.path.dirname(root), "abandoned")))
        project = os.path.dirname(os.path.dirname(self.run))
        if project.count("/") > 1:  # `/` or `/home` would make a project of everything
            found.append((PROJECT, project))
        return tuple(sorted(found, key=lambda item: -len(item[1])))

    def to_json(self) -> dict[str, Any]:
        """The absolute paths, as a remark in an entry: these are not made relative."""
        return {"run": self.run, "roots": list(self.roots)}

    def store(self, value: Any) -> Any:
        """The value with each absolute path below an anchor made relative to it; lists and mappings throughout."""
        return _each_text(value, self._store_text)

    def resolve(self, value: Any) -> Any:
        """The value with each stored path made absolute again, at the place where the anchors are now."""
        return _each_text(value, self._resolve_text)

    def _store_text(self, text: str) -> str:
        if text.startswith("/"):
            for name, directory in self._places:
                if text == directory or text.startswith(directory + "/"):
                    return name + text[len(directory) :]
        return "@" + text if _is_stored(text) else text

    def _resolve_text(self, text: str) -> str:
        if not text.startswith("@"):
            return text
        if text.startswith("@@"):
            return text[1:]
        for name, directory in self._places:
            if text == name or text.startswith(name + "/"):
                return directory + text[len(name) :]
        return text


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    """The value with each of its texts changed, except the remark `anchors`."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: item if key == "anchors" else _each_text(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_each_text(item, change) for item in value]
    return value


class Root(NamedTuple):
    """A checkpoint root of the run: its absolute path when it was last seen, and its path relative to the run directory."""

    path: str
    from_run: str

    def now(self, run: str) -> str:
        """Where it lies now: beside the run first, then at its recorded path."""
        beside = os.path.normpath(os.path.join(run, self.from_run))
        return beside if os.path.isdir(beside) or not os.path.isdir(self.path) else self.path


class Place(NamedTuple):
    """`run.json`: who this run is, and where its directory was last written to."""

    run_id: str
    host: str = ""
    path: str = ""  # of the run directory, absolute
    inode: int = 0
    journal_inode: int = 0
    roots: tuple[Root, ...] = ()
    names: tuple[str, ...] = ()  # of the run directory, past ones included: entries carry the name of their time
    parent: Parent | None = None
    more: Mapping[str, Any] = NOTHING  # what a newer version wrote

    def to_json(self) -> dict[str, Any]:
        """The persisted form."""
        record = {"v": VERSION, **self._asdict(), "roots": [root._asdict() for root in self.roots]}
        del record["parent"], record["more"]
        if self.parent:
            record["parent"] = self.parent.to_json()
        return record | dict(self.more)

    def anchors(self, run_dir: Path) -> Anchors:
        """Where the anchors are now."""
        run = os.path.abspath(run_dir)
        return Anchors(run=run, roots=tuple(root.now(run) for root in self.roots))

    def at(self, run_dir: Path, checkpoints: Path | None = None) -> "Place":
        """This run as it lies now; `checkpoints` names a checkpoint root that may be new."""
        run = os.path.abspath(run_dir)
        known = list(self.anchors(run_dir).roots)
        if checkpoints is not None and not any(is_same_directory(root, checkpoints) for root in known):
            known.append(os.path.abspath(checkpoints))
        return self._replace(
            host=os.uname().nodename,
            path=run,
            inode=_inode(run),
            journal_inode=_inode(os.path.join(run, "journal")),
            roots=tuple(Root(path=root, from_run=os.path.relpath(root, run)) for root in known),
            names=tuple(dict.fromkeys((*self.names, os.path.basename(run)))),
        )


def read_place(paths: RunPaths) -> Place | None:
    """The run's `run.json`; None when there is none. Raises `JournalError` when it cannot be understood."""
    path = paths.run_dir / "run.json"
    try:
        record = json.loads(path.read_bytes())
        if record["v"] != VERSION:
            raise JournalError(f"`{path}` has version {record['v']!r}: expected {VERSION}", "update chronicle")
        return Place(
            run_id=str(record["run_id"]),
            host=str(record.get("host") or ""),
            path=str(record.get("path") or ""),
            inode=int(record.get("inode") or 0),
            journal_inode=int(record.get("journal_inode") or 0),
            roots=tuple(Root(path=root["path"], from_run=root["from_run"]) for root in record.get("roots") or ()),
            names=tuple(str(name) for name in record.get("names") or ()),
            parent=Parent.from_json(record["parent"]) if record.get("parent") else None,
            more={key: value for key, value in record.items() if key not in KNOWN},
        )
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as problem:
        raise JournalError(f"cannot read `{path}`: {problem.strerror}", "make it readable") from problem
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        remedy = "it holds the run's id: restore it; if this is the run itself, delete it and the journal gives the id"
        raise JournalError(f"`{path}` is damaged: {problem}", remedy) from problem


KNOWN = frozenset(Place(run_id="", parent=Parent(run_id="", run="")).to_json())


def write_place(paths: RunPaths, place: Place, *, may_replace: bool = True) -> None:
    """Write `run.json` durably; with `may_replace` False an existing one is left alone and FileExistsError raised."""
    text = json.dumps(place.to_json(), indent=1) + "\n"
    from rollback.disk.durable import write_atomic  # written once in the life of a run directory

    write_atomic(paths.run_dir / "run.json", text, may_replace=may_replace)


def standing_of(place: Place, paths: RunPaths) -> Standing:
    """Whether the run directory at hand is the one that `place` describes."""
    run = os.path.abspath(paths.run_dir)
    journal = _inode(os.path.join(run, "journal"))
    if _is(place.inode, _inode(run)) and place.journal_inode in (0, journal):  # two, because small ones occur twice
        return Standing.HERE if run == place.path else Standing.MOVED
    if run == place.path:
        return Standing.MOVED  # restored from a backup, or a filesystem that was made anew: the same place
    return Standing.COPIED if _is(place.inode, _inode(place.path)) else Standing.UNCERTAIN


def look(paths: RunPaths) -> tuple[Place | None, Standing]:
    """The recorded place and how this directory stands to it; a run without `run.json` is HERE."""
    place = read_place(paths)
    return place, Standing.HERE if place is None else standing_of(place, paths)


def anchors_of(paths: RunPaths) -> Anchors:
    """Where the run's anchors are now; without a `run.json` only the run directory is known.

    Raises `JournalError` when it cannot be read: a path that is not resolved would look like one where nothing is.
    """
    place = read_place(paths)
    return Anchors(run=os.path.abspath(paths.run_dir)) if place is None else place.anchors(paths.run_dir)


def names_of(paths: RunPaths) -> frozenset[str]:
    """The names that the run's directory has had."""
    try:
        place = read_place(paths)
    except JournalError:
        place = None
    return frozenset((paths.run, *(() if place is None else place.names)))


def settle(paths: RunPaths, new_run_id: str, checkpoints: Path | None = None) -> tuple[Place, bool]:
    """The run's place before something is written, and whether it is new or has moved; `run.json` follows.

    Raises `Refusal` for a copy. `new_run_id` is taken when the run has none yet. The journal directory must exist.
    """
    place, standing = look(paths)
    if place is None:
        place = Place(run_id=_recorded_id(paths) or new_run_id).at(paths.run_dir, checkpoints)
        try:
            write_place(paths, place, may_replace=False)
        except FileExistsError:  # another writer was first
            return settle(paths, new_run_id, checkpoints)
        return place, False
    refuse_copy(place, standing, paths)
    found = place.at(paths.run_dir, checkpoints)
    if found != place:
        write_place(paths, found)
    return found, found.path != place.path


def _recorded_id(paths: RunPaths) -> str:
    """The id in the journal, for a run whose `run.json` is gone; "" for a run that never had one."""
    found = ""
    for path in sorted(paths.journal_dir.glob("*.jsonl")):
        try:
            lines = path.read_bytes().split(b"\n")
        except OSError:
            continue
        for line in lines:
            if b'"run_id"' in line and line.startswith(b"{"):
                try:
                    record = json.loads(line)
                    found = str(record["data"]["run_id"]) if record["kind"] in NAMES_RUN else found
                except (ValueError, KeyError, TypeError):
                    continue
    return found


def describe_parent(parent: Parent) -> str:
    """`run tr-190, step 30500 of launch 3`; a checkpoint that names no run is called by its path."""
    if not parent.run_id:
        return f"`{parent.path}`, step {parent.step} (it does not say which run saved it)"
    launch = "" if parent.launch is None else f" of launch {parent.launch}"
    return f"run {parent.run}, step {parent.step}{launch}"


def find_run(run_id: str, logs_dirs: Iterable[Path]) -> str:
    """The directory of the run with this id below one of the logs directories; "" when it is not there."""
    for logs in dict.fromkeys(logs_dirs):
        for path in sorted(logs.glob("*/run.json")) if run_id and logs.is_dir() else ():
            with contextlib.suppress(JournalError):
                place = read_place(RunPaths(path.parent))
                if place is not None and place.run_id == run_id:
                    return str(path.parent)
    return ""


def refuse_copy(place: Place, standing: Standing, paths: RunPaths) -> None:
    """Raise `Refusal` (exit 3) when nothing may be written here before a person has said what this directory is."""
    if standing not in (Standing.COPIED, Standing.UNCERTAIN):
        return
    run = os.path.abspath(paths.run_dir)
    what = "is a copy of" if standing is Standing.COPIED else "was copied, or moved to another filesystem, from"
    refusal = RunCopied(
        f"`{run}` {what} run {place.run_id} at `{place.path}` ({place.host}): nothing is written until you declare what it is",
        f"if the run was moved: `chronicle init --moved --run {paths.run}`; "
        f"if this is a new run: `chronicle init --fork-of {place.path} --run {paths.run}`",
    )
    refusal.run_dir, refusal.origin = run, place.path
    raise refusal


def is_parents(place: Place, root: str | Path) -> bool:
    """Whether a checkpoint root belongs to the run that this one began from: shared by a link, or named by both."""
    parent = place.parent
    if parent is None:
        return False
    found: tuple[str, ...] = ()
    with contextlib.suppress(JournalError):
        origin = read_place(RunPaths(Path(parent.path))) if parent.path and parent.run_id else None
        if origin is not None and origin.run_id == parent.run_id:
            found = origin.anchors(Path(parent.path)).roots
    return any(is_same_directory(root, other) for other in (*parent.shared, *found))


def _inode(path: str) -> int:
    try:
        return os.stat(path).st_ino
    except OSError:
        return 0


def is_same_directory(one: str | Path, other: str | Path) -> bool:
    """Whether two paths name one directory, whatever links or mounts lead there; directories need not exist."""
    try:
        return os.path.samefile(one, other)
    except OSError:
        return os.path.realpath(one) == os.path.realpath(other)


def _is(recorded: int, found: int) -> bool:
    return recorded != 0 and recorded == found


def _is_stored(text: str) -> bool:
    return text.startswith(("@@", RUN, CHECKPOINTS, ABANDONED, PROJECT))

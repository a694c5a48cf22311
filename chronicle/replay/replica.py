"""A run as it was when a replay begins, in a scratch directory: what a play sees of it, and where it writes.

    <scratch>/<run>/tree/…    the working directory, the checkpoint roots and the run's directory, each below its own whole path

Nothing is mounted, so a script is told of these places: the words of its command and its variables name those in the tree. Of
the checkpoints the one to begin with is there alone, and pointers name it. Large files are links to what they are. A script
that has such a place in its own text would write into the run, and is refused.
"""

import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from chronicle.errors import ChronicleError, Refusal
from chronicle.journal.place import read_place, write_place
from chronicle.latest import pointers_to
from chronicle.launch.code import SOURCE_SUFFIXES
from chronicle.launch.scratch import copy_tree
from chronicle.paths import RunPaths, list_launch_numbers
from chronicle.prints.launch_facts import SETTINGS, read_facts
from chronicle.rehearse.launches import Place
from chronicle.replay.closed import landlock_version
from chronicle.replay.plan import Plan, is_wide
from chronicle.resume.rehearsal import REHEARSAL_VARIABLE
from rollback.checkpoint.layout import Checkpoint
from rollback.checkpoint.listing import is_copy_of_newest, list_checkpoints
from rollback.checks.remnants import find_remnants
from rollback.transaction.apply import POINTER_NAMES
from rollback.transaction.cleanup import point_elsewhere

LINKED_BYTES = 16 << 20
LARGEST_TEXT = 1 << 20
LEVELS = 3  # above a place: what lies there is linked
NOT_OF_A_PLAY = ("launches", "objects", "heartbeats", "rehearsal", "plots")  # of the run's directory
ELSEWHERE = ("/dev", "/proc", "/sys", "/run", "/tmp", "/var/tmp")  # where a play may write as well
CACHES = ("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "HF_HOME")
IN_HOME = (".cache", ".triton", ".nv")
SMALLER = "give the command with its data elsewhere, after `--`: what lies outside of the directory is not copied"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica(Place):
    """One play's view of a run."""

    plan: Plan

    @property
    def tree(self) -> Path:
        """Below it lies everything under its own whole path."""
        return self.scratch / self.name / "tree"

    @property
    def out(self) -> Path:
        """The first checkpoint root."""
        return self.within(self.plan.roots[0]) if self.plan.roots else self.scratch / self.name / "none"

    @property
    def cwd(self) -> Path:
        """The working directory."""
        return self.within(self.plan.cwd)

    @property
    def paths(self) -> RunPaths:
        """The run."""
        return RunPaths(self.within(self.plan.settings.paths.run_dir))

    def within(self, path: Path) -> Path:
        """A place of the run, in the tree."""
        absolute = Path(os.path.abspath(path))
        return self.tree / absolute.relative_to(absolute.anchor)

    def prepare(self) -> None:
        """Copy what a play needs, once. Raises `Refusal` or `UsageProblem` where that cannot be."""
        if self.tree.exists():
            return
        if named := next(self._named_in_text(), None):
            raise Refusal(
                f"`{named[0]}` names `{named[1]}`, which is the run's own: a replay would write there",
                "give a command that names another place, after `--`",
            )
        plan, roots = self.plan, self._roots_apart()
        run_dir = plan.settings.paths.run_dir
        without = {self.scratch, *(Path(os.path.abspath(path)) for path in (run_dir, *roots, *plan.saves))}
        without |= {path for root in plan.roots for path in self._beside(root)}
        linked = LINKED_BYTES if landlock_version() else float("inf")
        for place in (plan.cwd, *roots):
            here = without - {place}
            copy_tree(place, self.within(place), here, remedy=SMALLER, linked_bytes=linked)
        self._copy_run()
        for root in plan.roots:
            self.within(root).mkdir(parents=True, exist_ok=True)
        if plan.begin is not None:
            self._lay(plan.begin.checkpoint)
        for directory in (self.scratch / self.name / "tmp", self.out):
            directory.mkdir(parents=True, exist_ok=True)
        for place in (plan.cwd, *roots):
            self._link_around(place, without)

    def _link_around(self, place: Path, without: Collection[Path]) -> None:
        """What lies beside a place and its parents: `../data` is the same there as here."""
        for parent in Path(os.path.abspath(place)).parents[:LEVELS]:
            for entry in parent.iterdir():
                here = self.within(entry)
                if entry not in without and not os.path.lexists(here):
                    here.symlink_to(entry)

    def _roots_apart(self) -> list[Path]:
        """The checkpoint roots that do not hold the working directory."""
        return [root for root in self.plan.roots if root.is_dir() and not is_wide(root, self.plan.cwd)]

    def _beside(self, root: Path) -> Iterator[Path]:
        """What a loader would take for a later state, or that names one where there was none yet."""
        if not root.is_dir():
            return
        begin = self.plan.begin
        yield root.parent / "abandoned"
        if begin is None:
            yield from (root / name for name in POINTER_NAMES)
        elif begin.checkpoint.path.parent == root and not is_wide(root, self.plan.cwd):
            listed = list_checkpoints(root, include_abandoned=False)
            yield from (root / name for name in find_remnants(root, listed, begin.checkpoint))

    def _named_in_text(self) -> Iterator[tuple[Path, Path]]:
        """Texts that the launch ran or was given and that name a place of the run: the file, and the place."""
        paths = self.plan.settings.paths
        facts = read_facts(paths.launch_dir(self.plan.launch)) or {}
        words = [word.rpartition("=")[2] for word in self.plan.command]
        given = [self.plan.cwd / word for word in words if self._is_text(self.plan.cwd / word)]
        for path in (*given, *filter(self._is_text, map(Path, facts.get("code") or ()))):
            text = path.read_text(encoding="utf-8", errors="replace")
            for place in (os.path.abspath(paths.run_dir), *map(os.path.abspath, self._roots_apart())):
                if re.search(re.escape(place) + r"(?![\w.-])", text):
                    yield path, Path(place)

    def _is_text(self, path: Path) -> bool:
        is_small = path.is_file() and path.stat().st_size <= LARGEST_TEXT
        return is_small and path.suffix in (*SOURCE_SUFFIXES, *SETTINGS)

    def _copy_run(self) -> None:
        """The run's directory without its launches, and with their numbers: the guard finds what it recorded of each save."""
        source = self.plan.settings.paths
        unwanted = shutil.ignore_patterns(*NOT_OF_A_PLAY, "*.html", "*.md", "*.lock")
        shutil.copytree(source.run_dir, self.paths.run_dir, ignore=unwanted)
        for number in list_launch_numbers(source):
            self.paths.launch_dir(number).mkdir(parents=True)
        place = read_place(source)
        if place is not None:
            write_place(self.paths, place.at(self.paths.run_dir))

    def _lay(self, one: Checkpoint) -> None:
        """The checkpoint to begin with lies where a loader looks, and what names the newest one names it."""
        source = one.path.parent if one.abandoned is None else self.plan.roots[0]
        root = self.within(source)
        if shutil.disk_usage(root).free < 2 * one.size_bytes:
            raise ChronicleError(f"no room for a copy of `{one.path}` at `{self.scratch}`", "name another place: --scratch DIR")
        if one.single_file:
            shutil.copy2(one.path, root / one.path.name)
        else:
            shutil.copytree(one.path, root / one.path.name, symlinks=True, dirs_exist_ok=True)
        gone = {path.name for path in self.plan.saves} - {one.path.name}
        listed = list_checkpoints(root, include_abandoned=False)
        kept = next((found for found in listed if found.path.name == one.path.name), None)
        point_elsewhere(root, tuple(pointers_to(root, gone, kept)))
        if one.single_file:
            for name in os.listdir(source):  # Lightning's `last.ckpt`: the newest under a second name
                if is_copy_of_newest(name) and name != one.path.name:
                    (root / name).symlink_to(one.path.name)

    # ---- what a play is told --------------------------------------------------------------------------------------------

    def told(self, text: str) -> str:
        """A word of the command or a variable, with the run's own places as they lie in the tree.

        What is there and was not copied (an environment) keeps its name.
        """
        places = (self.plan.cwd, self.plan.settings.paths.run_dir, *self.plan.roots)
        named = "|".join(sorted({re.escape(os.path.abspath(path)) for path in places}, key=len, reverse=True))
        return re.sub(rf"(?<![\w./-])(?:{named})(?![\w.-])[^\s:,;'\"=]*", self._moved, text)

    def _moved(self, found: re.Match[str]) -> str:
        there, here = Path(found[0]), self.within(Path(found[0]))
        return str(here) if here.exists() or not there.exists() else found[0]

    def untold(self, path: str) -> str:
        """The name of a file of the tree outside of it."""
        return path.removeprefix(str(self.tree))

    def environment(self) -> dict[str, str]:
        """The variables of a play: nothing is asked of its guard, and no hook is run."""
        found = {name: self.told(value) for name, value in self.plan.environ.items()}
        return found | {"TMPDIR": str(self.scratch / self.name / "tmp"), REHEARSAL_VARIABLE: ""}

    def rewritten(self) -> set[str]:
        """The variables that name another place in a play."""
        environ: Mapping[str, str] = self.plan.environ
        return {name for name, value in environ.items() if self.told(value) != value}

    def writable(self) -> list[str]:
        """The directories below which a play may write: of the usual ones those that hold nothing of the run."""
        usual = [Path(path) for path in ELSEWHERE] + [Path.home() / name for name in IN_HOME]
        usual += [Path(os.environ[name]) for name in CACHES if os.environ.get(name)]
        own = [Path(os.path.abspath(path)) for path in (*self.plan.own, *self.plan.roots, self.plan.cwd)]
        free = [path for path in usual if path.is_dir() and not any(one.is_relative_to(path) for one in own)]
        return [str(self.scratch), *map(str, free)]

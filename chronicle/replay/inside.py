"""The part of a replay that runs in the sandbox: rewinds what it sees to the checkpoint, and launches the recorded command.

Started by `replay.py` as `python -m chronicle.replay.inside SPEC`. In its private view (`sandbox.py`) later checkpoints are
removed, pointers name the one to begin with, and an abandoned one lies where a loader looks. Then it is a launch of the run
like any other, supervised until every rank has a print of the last step. Its prints and entries go to `<sandbox>/result`.
"""

import json
import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chronicle.errors import ChronicleError
from chronicle.journal import read_journal
from chronicle.journal.events import EntryKind
from chronicle.latest import pointers_to
from chronicle.launch.code import CodeChange, lay_code
from chronicle.launch.launching import LaunchRequest, launch
from chronicle.paths import RunPaths
from chronicle.replay.places import identity_of, is_wide, states_of
from chronicle.replay.sandbox import BIND, SandboxRefused, end_with_parent, enter_sandbox, mount, run_inside
from chronicle.resume.ring import Ring, rings_of
from rollback.checkpoint.layout import Checkpoint
from rollback.checkpoint.listing import is_copy_of_newest, list_checkpoints
from rollback.checks.remnants import find_remnants
from rollback.transaction.apply import POINTER_NAMES
from rollback.transaction.cleanup import point_elsewhere

GRACE_SECONDS = 10.0
REFUSED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What a fork starts: all that the process inside needs, as JSON."""

    run_dir: str
    roots: tuple[str, ...]
    checkpoint: str  # "": from the beginning
    name: str  # of the checkpoint in its root
    start: int
    until: int
    ranks: tuple[int, ...]
    command: tuple[str, ...]
    cwd: str
    environ: Mapping[str, str]
    overlaid: tuple[str, ...]
    sandbox: str
    launch: int
    code: CodeChange | None = None
    network: bool = False  # it may reach the network
    saved: Mapping[str, int] = field(default_factory=dict)  # by path: of which step a checkpoint is, by its identity

    @property
    def part(self) -> str:
        """Which steps, in words."""
        return f"steps {self.start + 1} to {self.until} of launch {self.launch}"

    @classmethod
    def read(cls, path: Path) -> "Spec":
        """The spec in this file."""
        found = json.loads(path.read_text(encoding="utf-8"))
        for name in ("roots", "ranks", "command", "overlaid"):
            found[name] = tuple(found[name])
        found["code"] = None if found["code"] is None else CodeChange(**found["code"])
        return cls(**found)


def main() -> int:
    """Play the spec; returns the launch's code, 3 where the sandbox is refused. What happened is in `result/end.json`."""
    end_with_parent()
    spec = Spec.read(Path(sys.argv[1]))
    result = Path(spec.sandbox) / "result"
    result.mkdir(exist_ok=True)
    try:
        left = enter_sandbox([Path(path) for path in spec.overlaid], Path(spec.sandbox), network=spec.network)
    except SandboxRefused as problem:
        _say_end(result, {"refused": problem.message, "remedy": problem.remedy})
        return REFUSED
    return run_inside(lambda: _play(spec, result, left))


def _play(spec: Spec, result: Path, left: list[str]) -> int:
    paths = RunPaths(Path(spec.run_dir))
    try:
        for root in spec.roots:
            rewind(Path(root), spec)
        if spec.code is not None and (why := lay_code(spec.code)):
            raise ChronicleError(why, "git must know the commit")
        os.chdir(spec.cwd)
        request = LaunchRequest(
            command=spec.command,
            paths=paths,
            checkpoints_dir=Path(spec.roots[0]) if spec.roots else None,
            cwd=Path(spec.cwd),
            environ=spec.environ,
            grace_seconds=GRACE_SECONDS,
            stop_on_proposal=True,
            force=f"a replay in a sandbox, of {spec.part}",
            recorded={"purpose": "replay", "part": spec.part},
        )
        end = launch(request, live_watch=lambda paths, number, *_, **__: Played(paths.launch_dir(number), spec))
    except (ChronicleError, OSError) as problem:
        _say_end(result, {"refused": getattr(problem, "message", str(problem)), "remedy": getattr(problem, "remedy", None)})
        return 1
    unwanted = shutil.ignore_patterns("evidence")
    shutil.copytree(paths.launch_dir(end.launch), result / "launch", dirs_exist_ok=True, ignore=unwanted)
    entries = [entry for entry in read_journal(paths).entries if entry.launch == end.launch]
    _copy_batches(paths, result, end.launch)
    verdicts = [dict(entry.data) for entry in entries if entry.kind == EntryKind.GUARD_VERDICT]
    told = {"launch": end.launch, "code": end.exit_code, "end": dict(end.data), "verdicts": verdicts}
    _say_end(result, {**told, "writable": left})
    return 0


def rewind(root: Path, spec: Spec) -> None:
    """Make a checkpoint root look as if the checkpoint to begin with were the newest; only what this view writes changes."""
    listed = list_checkpoints(root, include_abandoned=False) if root.is_dir() else []
    kept = next((one for one in listed if str(one.path) == spec.checkpoint), None)
    others = [one for one in listed if one is not kept]
    states = states_of(Path(spec.run_dir))
    if is_wide(root, Path(spec.cwd)) and any(identity_of(one, states) for one in listed):
        others = [one for one in others if identity_of(one, states)]  # a script's other files are no checkpoints of this run
    steps = {n: spec.saved.get(str(one.path), one.step) for one in others for n in one.names}  # a name may count something else
    gone = {name for name, step in steps.items() if step is None or step >= spec.start or not spec.checkpoint}
    if kept is not None:
        gone |= find_remnants(root, listed, kept).keys()
    elif spec.checkpoint and root == Path(spec.roots[0]):
        kept = _bring_back(root, spec)
        gone.discard(spec.name)
    copies = {name for name in os.listdir(root) if is_copy_of_newest(name)} if root.is_dir() else set()
    if gone and kept is None and not spec.checkpoint:  # at the beginning nothing was saved, and nothing named it
        gone |= copies | {name for name in POINTER_NAMES if os.path.lexists(root / name)}
    moves = tuple(pointers_to(root, gone, kept)) if root.is_dir() else ()
    point_elsewhere(root, moves)
    for name in sorted(gone):
        path = root / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    if gone and kept is not None and kept.single_file:
        for name in sorted(copies - gone - {kept.path.name}):  # Lightning's `last.ckpt`: the newest under a second name
            (root / name).unlink()
            (root / name).symlink_to(kept.path.name)


def _bring_back(root: Path, spec: Spec) -> Checkpoint | None:
    """A checkpoint that lies elsewhere (abandoned) appears in the root under its name: the same files, not a copy."""
    source, place = Path(spec.checkpoint), root / spec.name
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)
    place.mkdir(parents=True) if source.is_dir() else place.touch()
    mount(str(source), str(place), None, BIND)
    return next((one for one in list_checkpoints(root, include_abandoned=False) if one.path.name == spec.name), None)


def _copy_batches(paths: RunPaths, result: Path, number: int) -> None:
    """The record of batches of this launch."""
    for path in paths.batches_dir.glob("*") if paths.batches_dir.is_dir() else ():
        with path.open("rb") as file:
            try:
                header = json.loads(file.readline())
            except ValueError:
                continue
        if isinstance(header, dict) and header.get("launch") == number:
            (result / "batches").mkdir(exist_ok=True)
            shutil.copy(path, result / "batches" / path.name)


def _say_end(result: Path, words: Mapping[str, Any]) -> None:
    (result / "end.json").write_text(json.dumps(words, default=str), encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Enough:
    """The event that ends the replay; its tier asks for a stop."""

    title: str = "the last step to be compared has its prints"
    tier: str = "propose"


class Played:
    """A live watch that asks for a stop once every rank has a print of the last step."""

    def __init__(self, launch_dir: Path, spec: Spec) -> None:
        self._launch_dir, self._spec = launch_dir, spec

    def poll(self) -> Iterable[Enough]:
        """One event when it is done."""
        try:
            rings = rings_of(self._launch_dir)
        except ChronicleError:
            return ()
        done = all(rank in rings and _reached(rings[rank], self._spec.until) for rank in self._spec.ranks)
        return (Enough(),) if done else ()

    finish = poll


def _reached(ring: Ring, until: int) -> bool:
    return any(step >= until for step in ring.steps())


if __name__ == "__main__":
    sys.exit(main())

"""`chronicle init`: creates a run, starts one from another run's checkpoint, and records that a run was moved or copied."""

import json as json_module
import os
from pathlib import Path

from chronicle.checkpoints import known_states
from chronicle.cli.options import AT_CHECKPOINTS, AtCheckpoints, CommandResult, path_text, settings_from
from chronicle.errors import ChronicleError, UsageProblem
from chronicle.journal import JournalWriter, read_journal
from chronicle.journal.events import RunFork, RunInit, RunPlace
from chronicle.journal.place import (
    Parent,
    Place,
    Standing,
    describe_parent,
    find_run,
    is_same_directory,
    read_place,
    standing_of,
    write_place,
)
from chronicle.journal.writer import fresh_id
from chronicle.paths import RunPaths
from chronicle.settings import Settings, load_settings
from chronicle.story import read_story
from rollback.disk.durable import REAL_DISK, Attributes


def init(
    source: Path | None = None,
    moved: bool = False,
    fork_of: Path | None = None,
    at: AtCheckpoints = AT_CHECKPOINTS,
) -> CommandResult:
    """Create the journal of a run and a `chronicle.toml`.

    With --from, the run starts from a checkpoint of another run, which is only read. Nothing is written into a copied
    run directory until --moved or --fork-of is given once.

    Example: chronicle init --run tr-190 --checkpoints checkpoints/tr-190

    Options:
      --from CHECKPOINT: Start from this checkpoint of another run.
      --moved: This directory is the run itself, which was moved.
      --fork-of RUN_DIR: This directory is a copy of that run and now a run of its own.
    """
    settings = settings_from(at.run, at.logs, at.checkpoints)
    if sum((source is not None, moved, fork_of is not None)) > 1:
        raise UsageProblem("--from, --moved and --fork-of: expected at most one of them", "drop the others")
    if moved:
        return _claim_moved(settings)
    if fork_of is not None:
        return _claim_fork(settings, fork_of)
    paths = settings.paths
    lines = []
    parent = None if source is None else _parent_at(source, settings)
    if read_journal(paths).entries:
        if parent is not None:
            raise UsageProblem(
                f"run `{settings.run}` has a journal already: {paths.journal_dir}", "choose another name with --run"
            )
        lines.append(f"run `{settings.run}` already has a journal: {paths.journal_dir}")
    else:
        with JournalWriter(paths, checkpoints=settings.checkpoints_dir) as writer:
            event = RunInit(run_id=writer.place.run_id, checkpoints=path_text(settings.checkpoints_dir))
            writer.write(event, title=f"run {settings.run}")
            if parent is not None:
                write_place(paths, writer.place._replace(parent=parent))
                fork = RunFork(run_id=writer.place.run_id, parent=parent.to_json())
                writer.write(fork, step=parent.step, title=f"begins from {describe_parent(parent)}")
                lines.append(f"begins from {describe_parent(parent)}: let the first launch load `{source}`")
        lines.append(f"journal of run `{settings.run}`: {paths.journal_dir}")
    config = Path.cwd() / "chronicle.toml"
    if not config.exists():
        config.write_text(_config(settings), encoding="utf-8")
        lines.append(f"settings: {config}")
    acts_on = load_settings(Path.cwd(), os.environ).run
    if acts_on != settings.run:
        lines.append(f"commands here still act on run `{acts_on}` ({config.name}): name this one with --run {settings.run}")
    data = {"run": settings.run, "journal": str(paths.journal_dir), "checkpoints": path_text(settings.checkpoints_dir)}
    return CommandResult(lines=lines, data=data)


def _claim_moved(settings: Settings) -> CommandResult:
    """Record that this directory is the run itself."""
    paths = settings.paths
    place = _recorded_place(settings)
    copied = standing_of(place, paths) in (Standing.COPIED, Standing.UNCERTAIN)
    _unshare(paths.run_dir)
    write_place(paths, place.at(paths.run_dir, settings.checkpoints_dir))
    with JournalWriter(paths, checkpoints=settings.checkpoints_dir) as writer:
        event = RunPlace(run_id=place.run_id, host=writer.place.host, path=writer.place.path, copied=copied)
        writer.write(event, title=f"run moved from {place.path} to {writer.place.path}")
    text = f"run `{settings.run}` ({place.run_id}) is here now: {paths.run_dir}"
    return CommandResult(lines=text, data={"run": settings.run, "run_id": place.run_id, "moved_from": place.path})


def _claim_fork(settings: Settings, origin: Path) -> CommandResult:
    """Record that this directory is a copy of the run in `origin`, and from now on a run of its own."""
    paths = settings.paths
    place = _recorded_place(settings)
    found = read_place(RunPaths(Path(os.path.abspath(origin))))
    if found is not None and found.run_id != place.run_id:
        raise UsageProblem(
            f"`{origin}` is run {found.run_id}; `{paths.run_dir}` was copied from run {place.run_id} at `{place.path}`",
            f"chronicle init --fork-of {place.path}",
        )
    if is_same_directory(origin, paths.run_dir):
        raise UsageProblem(
            f"`{origin}` is this run's own directory",
            "copy the run directory to another place first, then run this command there",
        )
    story = read_story(paths, signs_of_life=False)
    parent = Parent(
        run_id=place.run_id,
        run=place.names[-1] if place.names else settings.run,
        step=story.lineage.head_step,
        launch=story.lineage.head_launch,
        last_launch=max((launch.number for launch in story.launches), default=0),
        path=os.path.abspath(origin),
        shared=_shared_roots(place, found, paths, origin),
    )
    own = Place(run_id=fresh_id(), parent=parent, names=place.names, roots=place.roots)
    _unshare(paths.run_dir)
    write_place(paths, own.at(paths.run_dir, settings.checkpoints_dir))
    with JournalWriter(paths, checkpoints=settings.checkpoints_dir) as writer:
        event = RunFork(run_id=own.run_id, parent=parent.to_json(), copied=True)
        writer.write(event, step=parent.step, title=f"fork of {describe_parent(parent)}")
    text = f"run `{settings.run}` ({own.run_id}) is a fork of {describe_parent(parent)}: {paths.run_dir}"
    for root in parent.shared:
        text += f"\n`{root}` holds the checkpoints of its parent: name a directory of its own with --checkpoints DIR"
    return CommandResult(lines=text, data={"run": settings.run, "run_id": own.run_id, "parent": parent.to_json()})


def _shared_roots(place: Place, origin: Place | None, paths: RunPaths, origin_dir: Path) -> tuple[str, ...]:
    """The checkpoint roots that were not copied: the copy reaches those of its parent by a link or by their absolute path."""
    theirs = [root.path for root in place.roots]
    theirs += () if origin is None else origin.anchors(Path(os.path.abspath(origin_dir))).roots
    own = place.anchors(paths.run_dir).roots
    return tuple(os.path.realpath(one) for one in own if any(is_same_directory(one, other) for other in theirs))


def _unshare(run_dir: Path) -> None:
    """Give this directory files of its own where a copy by links shares those that are written in place."""
    for path in run_dir.iterdir():
        if path.is_file() and (path.is_symlink() or path.stat().st_nlink > 1):
            made = path.with_name(f".{path.name}.{os.getpid()}")
            REAL_DISK.copy_new(path, made)
            REAL_DISK.set_attributes(made, Attributes.of(path.resolve()))
            REAL_DISK.replace(made, path)


def _recorded_place(settings: Settings) -> Place:
    place = read_place(settings.paths)
    if place is None:
        raise ChronicleError(
            f"`{settings.paths.run_dir}` holds no `run.json`: the run that it was copied from is unknown",
            "leave the option out: the next command gives the run an id",
        )
    return place


def _parent_at(source: Path, settings: Settings) -> Parent:
    """The run, launch and step that saved a checkpoint, as it says itself."""
    from rollback.checkpoint.identity import read_identity
    from rollback.checkpoint.listing import open_checkpoint

    checkpoint = open_checkpoint(Path(os.path.abspath(source)))
    logs_dirs = list(dict.fromkeys((settings.logs_dir, *(folder / "logs" for folder in checkpoint.path.parents))))
    identity = read_identity(checkpoint)
    journals = (one for logs in logs_dirs for one in sorted(logs.glob("*/journal")))
    while not identity and (journal_dir := next(journals, None)) is not None:  # the run that saved it knows it
        identity = known_states(read_journal(RunPaths(journal_dir.parent)).entries).identity_in(checkpoint)
    run_id = str(identity.get("run_id") or "")
    return Parent(
        run_id=run_id,
        run=str(identity.get("run") or ""),
        step=checkpoint.step,
        launch=identity.get("launch"),
        path=find_run(run_id, logs_dirs) if identity else str(checkpoint.path),
    )


def _config(settings: Settings) -> str:
    values = {"run": settings.run, "logs": settings.logs_dir, "checkpoints": settings.checkpoints_dir}
    lines = []
    for name, value in values.items():
        if isinstance(value, Path) and value.is_relative_to(Path.cwd()):
            value = value.relative_to(Path.cwd())
        # a TOML basic string; JSON escapes the same characters in the same way
        text = json_module.dumps(str(value), ensure_ascii=False)
        lines.append(f"{name} = {text}" if value else '# checkpoints = "checkpoints"')
    return "\n".join(lines) + "\n"



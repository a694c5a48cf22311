"""Shared parts of the commands: their options, the settings of the run, and the result that a command returns.

`main.py` renders results for people or as JSON.
"""

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from chronicle.errors import ChronicleError
from chronicle.paths import RunPaths
from chronicle.settings import Settings, is_url, load_settings, refuse_store

if TYPE_CHECKING:
    from rollback.checkpoint.layout import Checkpoint

__all__ = [
    "CheckpointsOption",
    "CommandResult",
    "ExitCode",
    "ForceOption",
    "JsonOption",
    "LogsOption",
    "RunOption",
    "YesOption",
    "checkpoint_named",
    "given_flags",
    "name_twins",
    "nearest_runs",
    "need_run",
    "settings_from",
    "settings_root",
    "settings_with_checkpoints",
]


def _runs(incomplete: str) -> list[str]:
    from chronicle.cli.completion import complete_runs

    return complete_runs(incomplete)


RunOption = Annotated[str | None, typer.Option("--run", help="Name of the run.", metavar="NAME", autocompletion=_runs)]
LogsOption = Annotated[Path | None, typer.Option("--logs", help="Directory of all runs [logs].", metavar="DIR")]
CheckpointsOption = Annotated[
    Path | None, typer.Option("--checkpoints", help="Directory in which the trainer saves checkpoints.", metavar="DIR")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
ForceOption = Annotated[
    str | None,
    typer.Option(
        "--force",
        help="Continue although the run seems alive or its journal is damaged, for this reason.",
        metavar="REASON",
    ),
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask; needed without a terminal.")]


def given_flags(logs: Path | None, checkpoints: Path | None) -> tuple[str, ...]:
    """The directory flags of this command as text, for the command that it proposes."""
    given = (("--logs", logs), ("--checkpoints", checkpoints))
    return tuple(f"{flag} {shlex.quote(str(value))}" for flag, value in given if value is not None)


def settings_from(
    run: str | None, logs: Path | None, checkpoints: Path | None = None, *, stores: bool = False
) -> Settings:
    """The settings of this command: from files, environment variables and these flags. `stores`: it reads object stores too."""
    settings = load_settings(Path.cwd(), os.environ, run=run, logs=logs, checkpoints=checkpoints, stores=stores)
    if settings.utc:
        os.environ["CHRONICLE_UTC"] = "1"  # for this command and what it starts
    return settings


# --- The result of a command


class ExitCode(IntEnum):
    """The exit codes, documented in `docs/exit_codes.md`; `chronicle run` returns the launcher's own code."""

    DONE = 0
    ERROR = 1
    USAGE = 2
    REFUSED = 3
    STOPPED_PART_WAY = 4
    FINDINGS = 5
    DO_NOT_REQUEUE = 78
    CANNOT_START = 125
    INTERRUPTED = 130


class CommandResult(NamedTuple):
    """What a command returns: `text` for stdout, `talk` for stderr, `data` for `--json` (one object, or a list)."""

    text: str = ""
    data: Mapping[str, Any] | Sequence[Any] | None = None
    exit_code: int = ExitCode.DONE
    talk: tuple[str, ...] = ()


# --- The run that a command reads


def need_run(settings: Settings) -> Settings:
    """Return the settings; raises `ChronicleError` when there is no such run, with the nearest runs when none was named."""
    if settings.paths.run_dir.is_dir():
        return settings
    if settings.origin.get("run") == "name of the working directory":
        near = nearest_runs(Path.cwd())
        hint = "start one with `chronicle init` or `chronicle run -- …`"
        if near:
            first = f"--logs {shlex.quote(os.path.dirname(near[0]))} --run {os.path.basename(near[0])}"
            hint = f"nearest: {', '.join(f'`{path}`' for path in near)}; name one with {first}"
        raise ChronicleError(f"no journal here: `{settings.logs_dir}` holds no run", hint)
    known = sorted(p.parent.name for p in settings.logs_dir.glob("*/journal") if p.is_dir())
    found = ", ".join(known[:8]) if known else "no run at all"
    raise ChronicleError(
        f"no run `{settings.run}` (from {settings.origin.get('run', 'default')}) in `{settings.logs_dir}`: found {found}",
        "name another with --run NAME, or start it with `chronicle init` or `chronicle run -- …`",
    )


def nearest_runs(here: Path, most: int = 3) -> list[str]:
    """Run directories with a journal in children, parents and siblings, as paths relative to `here`; the nearest first."""
    found: dict[str, None] = {}
    for directory, pattern in _near(here):
        try:
            for journal in sorted(directory.glob(pattern)):
                if journal.is_dir():
                    found[os.path.relpath(journal.parent, here)] = None
                if len(found) >= most:
                    return list(found)
        except OSError:
            continue  # a directory that may not be listed
    return list(found)


def _near(here: Path) -> Iterator[tuple[Path, str]]:
    """(directory, pattern of journals below it): here, then each parent (three of them) and its other children."""
    yield here, "*/journal"  # inside a `logs` directory
    yield here, "*/logs/*/journal"
    for parent in list(here.parents)[:3]:
        if parent != Path(parent.anchor):
            yield parent, "journal"
            yield parent, "logs/*/journal"
            yield parent, "*/logs/*/journal"


# --- The checkpoints directory, from settings or from the journal


def settings_with_checkpoints(
    run: str | None, logs: Path | None, checkpoints: Path | None, *, stores: bool = False
) -> Settings:
    """The settings of a command that works on checkpoints, with the checkpoints directory.

    It is the configured one; else the one recorded at saves, if exactly one of those still exists; else `checkpoints`
    here. If several exist, none is chosen and `origin` names them.
    """
    settings = settings_from(run, logs, checkpoints, stores=stores)
    if settings.checkpoints_url is not None:
        return settings
    if settings.checkpoints_dir is not None and settings.origin.get("checkpoints") != "default":
        return settings
    roots = _recorded_roots(settings.paths)
    existing = [root for root in roots if root.is_dir()]
    if len(existing) == 1:
        return _with(settings, existing[0], "the journal's checkpoints")
    if not roots or settings.checkpoints_dir in existing:
        return settings
    reason = "several in the journal: " if existing else "recorded in the journal, but gone: "
    return _with(settings, None, reason + ", ".join(f"`{root}`" for root in (existing or roots)[:4]))


def _with(settings: Settings, root: Path | None, origin: str) -> Settings:
    return replace(settings, checkpoints_dir=root, origin={**settings.origin, "checkpoints": origin})


def _recorded_roots(paths: RunPaths) -> list[Path]:
    """The roots in `run.json`; those of the saves in the journal where an earlier version wrote it."""
    if not paths.journal_dir.is_dir():
        return []
    from chronicle.checkpoints import find_checkpoint_roots
    from chronicle.journal import read_journal
    from chronicle.journal.events import EntryKind
    from chronicle.journal.place import anchors_of

    try:
        roots = [Path(root) for root in anchors_of(paths).roots]
        roots = roots or [*find_checkpoint_roots(read_journal(paths).of_kind(EntryKind.CHECKPOINT), None, Path.cwd())]
    except (ChronicleError, OSError):
        return []  # the command that reads the journal reports what is wrong with it
    return list(dict.fromkeys(Path(os.path.abspath(root)) for root in roots))


def settings_root(
    named: str, run: str | None, logs: Path | None, checkpoints: Path | None, *, stores: bool = False
) -> Path | None:
    """The checkpoints directory of the settings; None when the checkpoint is given by its path."""
    if Path(named).exists() or (not named.partition("@")[0].isdigit() and "/" in named):
        return None
    return settings_with_checkpoints(run, logs, checkpoints, stores=stores).need_checkpoints()


def checkpoint_named(named: str, root: Path | None, *, count_steps: bool = True) -> "Checkpoint":
    """The checkpoint at a path, or of a step (`30500`, `30500@LAUNCH`) below `root`."""
    from rollback.checkpoint.listing import list_checkpoints, open_checkpoint, select_checkpoint

    if is_url(named):
        raise refuse_store(named)
    step, _, launch = named.partition("@")
    if root is not None and step.isdigit() and (not launch or launch.isdigit()):
        return select_checkpoint(list_checkpoints(root), int(step), int(launch) if launch else None, root)
    path = root / named if root is not None and (root / named).exists() else named
    return open_checkpoint(path, count_steps=count_steps)


def name_twins(*chosen: "Checkpoint") -> tuple[str, ...]:
    """One line for each abandoned checkpoint of the same step: the step alone meant the one of the present lineage."""
    return tuple(f"step {one.step} was also abandoned: {twin}" for one in chosen for twin in one.twins)

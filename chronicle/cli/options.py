"""Shared parts of the commands: their options, the settings of the run, and the result that a command returns.

`main.py` renders results for people or as JSON.
"""

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from chronicle.errors import ChronicleError
from chronicle.journal.place import anchors_of
from chronicle.paths import RunPaths
from chronicle.settings import Settings, load_settings

__all__ = [
    "CheckpointsOption",
    "CommandResult",
    "ExitCode",
    "ForceOption",
    "JsonOption",
    "LogsOption",
    "RunOption",
    "YesOption",
    "given_flags",
    "need_run",
    "settings_from",
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
        "--force", help="Continue although the run seems alive or its journal is damaged, for this reason.", metavar="REASON"
    ),
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask; needed without a terminal.")]


def given_flags(logs: Path | None, checkpoints: Path | None) -> tuple[str, ...]:
    """The directory flags of this command as text, for the command that it proposes."""
    given = (("--logs", logs), ("--checkpoints", checkpoints))
    return tuple(f"{flag} {shlex.quote(str(value))}" for flag, value in given if value is not None)


def settings_from(run: str | None, logs: Path | None, checkpoints: Path | None = None) -> Settings:
    """The settings of this command: from files, environment variables and these flags."""
    return load_settings(Path.cwd(), os.environ, run=run, logs=logs, checkpoints=checkpoints)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """What a command returns: `text` for stdout, `talk` for stderr, `data` for `--json` (one object, or a list)."""

    text: str = ""
    data: Mapping[str, Any] | Sequence[Any] | None = None
    exit_code: int = ExitCode.DONE
    talk: tuple[str, ...] = field(default=())


# --- The run that a command reads


def need_run(settings: Settings) -> Settings:
    """Return the settings; raises `ChronicleError` when the user named a run that does not exist."""
    if settings.paths.run_dir.is_dir() or settings.origin.get("run") == "name of the working directory":
        return settings
    known = sorted(p.parent.name for p in settings.logs_dir.glob("*/journal") if p.is_dir())
    found = ", ".join(known[:8]) if known else "no run at all"
    raise ChronicleError(
        f"no run `{settings.run}` (from {settings.origin.get('run', 'default')}) in `{settings.logs_dir}`: found {found}",
        "name another with --run NAME, or start it with `chronicle init` or `chronicle run -- …`",
    )


# --- The checkpoints directory, from settings or from the journal

def settings_with_checkpoints(run: str | None, logs: Path | None, checkpoints: Path | None) -> Settings:
    """The settings of a command that works on checkpoints, with the checkpoints directory.

    It is the configured one; else the one recorded at saves, if exactly one of those still exists; else `checkpoints`
    here. If several exist, none is chosen and `origin` names them.
    """
    settings = settings_from(run, logs, checkpoints)
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

    try:
        roots = [Path(root) for root in anchors_of(paths).roots]
        roots = roots or find_checkpoint_roots(read_journal(paths).of_kind(EntryKind.CHECKPOINT), None, Path.cwd())
    except (ChronicleError, OSError):
        return []  # the command that reads the journal reports what is wrong with it
    return list(dict.fromkeys(Path(os.path.abspath(root)) for root in roots))

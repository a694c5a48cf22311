"""The options that commands share, and the way from them to settings and journal."""

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from chronicle.settings import Settings, load_settings

__all__ = ["CheckpointsOption", "JsonOption", "LogsOption", "RunOption", "YesOption", "given_flags", "settings_from"]



def _runs(incomplete: str) -> list[str]:
    from chronicle.cli.completion import complete_runs

    return complete_runs(incomplete)


RunOption = Annotated[str | None, typer.Option("--run", help="Name of the run.", metavar="NAME", autocompletion=_runs)]
LogsOption = Annotated[Path | None, typer.Option("--logs", help="Where runs are kept [logs].", metavar="DIR")]
CheckpointsOption = Annotated[
    Path | None, typer.Option("--checkpoints", help="Where the trainer saves checkpoints.", metavar="DIR")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask; needed where there is no terminal.")]


def given_flags(logs: Path | None, checkpoints: Path | None) -> tuple[str, ...]:
    """The flags that this command was given, as text: the command that it proposes needs them too."""
    given = (("--logs", logs), ("--checkpoints", checkpoints))
    return tuple(f"{flag} {shlex.quote(str(value))}" for flag, value in given if value is not None)


def settings_from(run: str | None, logs: Path | None, checkpoints: Path | None = None) -> Settings:
    """Settings of this command: files and environment, then these flags."""
    return load_settings(Path.cwd(), os.environ, run=run, logs=logs, checkpoints=checkpoints)

"""`chronicle run -- <launcher …>`: start one launch of a run and stay with it to its end."""

import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from chronicle.commands.options import CheckpointsOption, LogsOption, RunOption, settings_from
from chronicle.commands.result import CommandResult
from chronicle.errors import UsageProblem

__all__ = ["run"]

DEFAULT_GRACE_SECONDS = 90.0
CONTEXT: Mapping[str, Any] = {"allow_interspersed_args": False}


def run(
    launcher: Annotated[list[str] | None, typer.Argument(help="The launcher and its arguments, after `--`.")] = None,
    on_propose: Annotated[
        str, typer.Option(help="When the detector proposes a rollback: `stop` or `continue`.", metavar="ACTION")
    ] = "continue",
    grace: Annotated[
        float, typer.Option(help="Seconds between a forwarded signal and KILL; longer than a save.", metavar="SECONDS")
    ] = DEFAULT_GRACE_SECONDS,
    force: Annotated[
        str | None, typer.Option(help="Start although a launch seems alive on another host; the reason is journalled.")
    ] = None,
    run: RunOption = None,
    logs: LogsOption = None,
    checkpoints: CheckpointsOption = None,
) -> CommandResult:
    """Start a launcher under supervision: journal, logs, detector, no orphans.

    Example: chronicle run --run demo -- torchrun --nproc_per_node 2 train.py

    Returns the launcher's exit code, 128+n for a signal, 125 when nothing was started.
    """
    from chronicle.launch.launching import LaunchRequest, launch

    command = launcher or []
    if not command:
        raise UsageProblem("no launcher given", "chronicle run -- torchrun --nproc_per_node 2 train.py")
    if on_propose not in ("stop", "continue"):
        raise UsageProblem(f"--on-propose is `{on_propose}`: expected `stop` or `continue`")
    if grace < 0:
        raise UsageProblem(f"--grace is {grace:g}: expected seconds, 0 or more")
    settings = settings_from(run, logs, checkpoints)
    end = launch(
        LaunchRequest(
            command=tuple(command),
            paths=settings.paths,
            checkpoints_dir=settings.checkpoints_dir,
            cwd=Path.cwd(),
            environ=dict(os.environ),
            grace_seconds=grace,
            stop_on_proposal=on_propose == "stop",
            force=force,
        ),
        live_watch=_live_watch(),
    )
    return CommandResult(data={"launch": end.launch, **end.data}, exit_code=end.exit_code)


def _live_watch() -> Any:
    """The live detector, where this installation has one."""
    try:
        watch = import_module("chronicle.watch")
    except ImportError:
        return None
    return getattr(watch, "LiveWatch", None)


run.context_settings = CONTEXT  # type: ignore[attr-defined]  # what follows the launcher's name is the launcher's

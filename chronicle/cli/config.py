"""`chronicle init` creates a run; `chronicle config` shows its settings."""

import json as json_module
from pathlib import Path
from typing import Annotated

import typer

from chronicle.cli.options import (
    CheckpointsOption,
    CommandResult,
    JsonOption,
    LogsOption,
    RunOption,
    settings_from,
    settings_with_checkpoints,
)
from chronicle.errors import UsageProblem
from chronicle.journal import JournalWriter, read_journal
from chronicle.journal.events import RunInit
from chronicle.story.plain import plain

__all__ = [
    "app",
    "init",
]

HELP = "Show the settings, or print the shell completion script."
app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True, help=HELP)


@app.command("show")
def show_settings(
    run: RunOption = None, logs: LogsOption = None, checkpoints: CheckpointsOption = None, json: JsonOption = False
) -> CommandResult:
    """Show each setting and the origin of its value.

    Example: chronicle config show
    """
    settings = settings_with_checkpoints(run, logs, checkpoints)
    values: dict[str, str | None] = {
        "logs": str(settings.logs_dir),
        "run": settings.run,
        "checkpoints": _path_text(settings.checkpoints_dir),
        "mlflow_uri": settings.mlflow_uri,
        "deepspeed_config": _path_text(settings.deepspeed_config),
        **{key: settings.hooks.get(key) for key in ("on_notice", "on_warn", "on_propose")},
    }
    origin = {key: settings.origin.get(key, "default") for key in values}
    if values["checkpoints"] and origin["checkpoints"] == "default":
        origin["checkpoints"] = "directory `checkpoints` here"
    width = max(len(key) for key in values)
    lines = [f"{key:<{width}}  {plain(value) if value else '-'}  ({plain(origin[key])})" for key, value in values.items()]
    data = {key: {"value": value, "origin": origin[key]} for key, value in values.items()}
    return CommandResult(text="\n".join(lines), data=data)


@app.command("completion")
def completion_script(
    shell: Annotated[str, typer.Argument(help="`bash`, `zsh` or `fish`.", metavar="SHELL")],
) -> CommandResult:
    """Print the script with which your shell completes commands, runs, steps and entry ids.

    Example: chronicle config completion bash > ~/.local/share/bash-completion/completions/chronicle
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    if shell not in ("bash", "zsh", "fish"):
        raise UsageProblem(f"no completion for `{shell}`: expected bash, zsh or fish")
    text = get_completion_script(prog_name="chronicle", complete_var="_CHRONICLE_COMPLETE", shell=shell)
    return CommandResult(text=text)


def _path_text(path: Path | None) -> str | None:
    return None if path is None else str(path)


# --- chronicle init


def init(
    run: RunOption = None, logs: LogsOption = None, checkpoints: CheckpointsOption = None, json: JsonOption = False
) -> CommandResult:
    """Create the journal of a run and a `chronicle.toml`.

    Example: chronicle init --run tr-190 --checkpoints checkpoints/tr-190
    """
    settings = settings_from(run, logs, checkpoints)
    paths = settings.paths
    lines = []
    if read_journal(paths).entries:
        lines.append(f"run `{settings.run}` already has a journal: {paths.journal_dir}")
    else:
        with JournalWriter(paths) as writer:
            writer.write(RunInit(checkpoints=_path_text(settings.checkpoints_dir)), title=f"run {settings.run}")
        lines.append(f"journal of run `{settings.run}`: {paths.journal_dir}")
    config = Path.cwd() / "chronicle.toml"
    if not config.exists():
        config.write_text(_config(settings.run, settings.logs_dir, settings.checkpoints_dir), encoding="utf-8")
        lines.append(f"settings: {config}")
    data = {"run": settings.run, "journal": str(paths.journal_dir), "checkpoints": _path_text(settings.checkpoints_dir)}
    return CommandResult(text="\n".join(lines), data=data)


def _config(run: str, logs_dir: Path, checkpoints_dir: Path | None) -> str:
    lines = [f"run = {_quoted(run)}", f"logs = {_quoted(_relative(logs_dir))}"]
    known = checkpoints_dir is not None
    lines.append(f"checkpoints = {_quoted(_relative(checkpoints_dir))}" if known else '# checkpoints = "checkpoints"')
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """A TOML basic string; JSON escapes the same characters in the same way."""
    return json_module.dumps(text, ensure_ascii=False)


def _relative(path: Path | None) -> str:
    if path is None:
        return ""
    try:
        return path.relative_to(Path.cwd()).as_posix()
    except ValueError:
        return path.as_posix()


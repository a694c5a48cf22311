"""`chronicle config` shows the settings of a run and prints the completion script."""

import json
import re
from pathlib import Path

import typer

from chronicle.cli.options import AT_CHECKPOINTS, AtCheckpoints, CommandResult, LogsOption, all_runs, path_text, spread
from chronicle.errors import UsageProblem
from chronicle.settings import settings_file
from rollback.disk.durable import write_atomic

HELP = "Show the settings, or print the shell completion script."
app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True, help=HELP)


@app.command("show")
@spread
def show_settings(at: AtCheckpoints = AT_CHECKPOINTS) -> CommandResult:
    """Show each setting and the origin of its value.

    Example: chronicle config show
    """
    settings = at.settings()
    values: dict[str, str | None] = {
        "logs": str(settings.logs_dir),
        "run": settings.run,
        "checkpoints": path_text(settings.checkpoints_dir),
        "mlflow_uri": settings.mlflow_uri,
        "deepspeed_config": path_text(settings.deepspeed_config),
        "utc": "true" if settings.utc else None,
        "batch_text": None if settings.batch_text else "false",
        **{key: settings.hooks.get(key) for key in ("on_notice", "on_warn", "on_propose")},
    }
    origin = {key: settings.origin.get(key, "default") for key in values}
    if values["checkpoints"] and origin["checkpoints"] == "default":
        origin["checkpoints"] = "directory `checkpoints` here"
    width = max(len(key) for key in values)
    lines = [f"{key:<{width}}  {value or '-'}  ({origin[key]})" for key, value in values.items()]
    data = {key: {"value": value, "origin": origin[key]} for key, value in values.items()}
    return CommandResult(lines=lines, data=data)


def use(named: str, logs: LogsOption = None) -> CommandResult:
    """Let the commands in this directory act on another run.

    It writes `run` in the `chronicle.toml` that they read, or in one here. Example: chronicle use tr-191

    Options:
      RUN: The name of the run.
    """
    from chronicle.runs import open as open_run

    open_run(named, logs=all_runs(logs))
    file = settings_file(Path.cwd()) or Path.cwd() / "chronicle.toml"
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    line = f"run = {json.dumps(named, ensure_ascii=False)}\n"
    written, count = re.subn(r"^run\s*=.*\n?", lambda _: line, text, count=1, flags=re.MULTILINE)
    write_atomic(file, written if count else line + text)
    return CommandResult(lines=f"commands here act on run `{named}` ({file})", data={"run": named, "file": str(file)})


@app.command("completion")
@spread
def completion_script(shell: str) -> CommandResult:
    """Print the shell completion script.

    Example: chronicle config completion bash > ~/.local/share/bash-completion/completions/chronicle

    Options:
      SHELL: `bash`, `zsh` or `fish`.
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    if shell not in ("bash", "zsh", "fish"):
        raise UsageProblem(f"no completion for `{shell}`: expected bash, zsh or fish")
    text = get_completion_script(prog_name="chronicle", complete_var="_CHRONICLE_COMPLETE", shell=shell)
    return CommandResult(raw=text)

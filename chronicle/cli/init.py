"""`chronicle init`: create a run's journal and a `chronicle.toml` that names it. Twice is fine."""

import json as json_module
from pathlib import Path

from chronicle.cli.options import CheckpointsOption, JsonOption, LogsOption, RunOption, settings_from
from chronicle.cli.result import CommandResult
from chronicle.journal import JournalWriter, read_journal

__all__ = ["init"]


def init(
    run: RunOption = None, logs: LogsOption = None, checkpoints: CheckpointsOption = None, json: JsonOption = False
) -> CommandResult:
    """Create the journal of a run, and `chronicle.toml` when there is none.

    Example: chronicle init --run tr-190 --checkpoints checkpoints/tr-190
    """
    settings = settings_from(run, logs, checkpoints)
    paths = settings.paths
    lines = []
    if read_journal(paths).entries:
        lines.append(f"run `{settings.run}` already has a journal: {paths.journal_dir}")
    else:
        with JournalWriter(paths) as writer:
            writer.append("run.init", title=f"run {settings.run}", data={"checkpoints": _text(settings.checkpoints_dir)})
        lines.append(f"journal of run `{settings.run}`: {paths.journal_dir}")
    config = Path.cwd() / "chronicle.toml"
    if not config.exists():
        config.write_text(_config(settings.run, settings.logs_dir, settings.checkpoints_dir), encoding="utf-8")
        lines.append(f"settings: {config}")
    data = {"run": settings.run, "journal": str(paths.journal_dir), "checkpoints": _text(settings.checkpoints_dir)}
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


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)

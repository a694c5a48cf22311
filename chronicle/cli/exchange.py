"""`chronicle export`: the run's one honest curve for other tools."""

import io
import shutil
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from chronicle.cli.existing import need_run
from chronicle.cli.options import JsonOption, LogsOption, RunOption, settings_from
from chronicle.cli.result import CommandResult
from chronicle.errors import ChronicleError, UsageProblem
from chronicle.paths import RunPaths
from chronicle.report.writing import write_page
from chronicle.story import Story, read_story

__all__ = ["Format", "export"]


class Format(StrEnum):
    """What can be written."""

    CSV = "csv"
    JSON = "json"
    JSONL = "jsonl"
    PARQUET = "parquet"
    TENSORBOARD = "tensorboard"


def export(
    format_name: Annotated[
        Format, typer.Option("--format", "-f", help="What to write; json is one array of rows, jsonl a row a line.")
    ] = Format.CSV,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File, or directory for TensorBoard [stdout].")] = None,
    every: Annotated[bool, typer.Option("--all", help="Abandoned steps too, marked `kept` 0.")] = False,
    run: RunOption = None,
    logs: LogsOption = None,
    json: JsonOption = False,
) -> CommandResult:
    """Export the metrics of the lineage: each step once, from the launch the present weights descend from.

    Example: chronicle export --format tensorboard -o tb
    """
    settings = need_run(settings_from(run, logs))
    story = read_story(settings.paths)
    if out is None and format_name in (Format.PARQUET, Format.TENSORBOARD):
        raise UsageProblem(f"--format {format_name.value} cannot be written to stdout", "name a file or directory with -o")
    if format_name is Format.TENSORBOARD:
        assert out is not None
        count = _tensorboard(story, settings.paths, out)
    else:
        count, text = _table(story, settings.paths, format_name, out, every=every)
        if out is None:
            return CommandResult(text=text, data={"run": settings.run, "rows": count, "format": format_name.value})
    data = {"run": settings.run, "rows": count, "format": format_name.value, "path": str(out)}
    return CommandResult(text=str(out), data=data, talk=(f"{count} rows",))


def _table(story: Story, paths: RunPaths, name: Format, out: Path | None, *, every: bool) -> tuple[int, str]:
    from chronicle.integrations.exports import canonical_rows, channel_names
    from chronicle.integrations.tables import write_csv, write_json, write_jsonl, write_parquet

    channels = channel_names(canonical_rows(paths, story.lineage, abandoned=every))
    rows = canonical_rows(paths, story.lineage, abandoned=every)
    if name is Format.PARQUET:
        assert out is not None
        return write_parquet(rows, channels, out), ""
    text = io.StringIO()
    write = {Format.CSV: write_csv, Format.JSON: write_json, Format.JSONL: write_jsonl}[name]
    count = write(rows, channels, text)
    if out is not None:
        write_page(out, text.getvalue())
    return count, text.getvalue()


def _tensorboard(story: Story, paths: RunPaths, out: Path) -> int:
    from chronicle.integrations.exports import canonical_rows
    from chronicle.integrations.tensorboard import write_tensorboard

    if out.exists():
        ours = out.is_dir() and all(p.name.endswith(".chronicle") for p in out.iterdir())
        if not ours:
            raise ChronicleError(f"`{out}` is there already and not of our making", "name another directory with -o")
        shutil.rmtree(out)  # event files of an earlier export: TensorBoard would read both
    return write_tensorboard(canonical_rows(paths, story.lineage, abandoned=True), story.lineage, out)

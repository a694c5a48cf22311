"""`chronicle export`, `import` and `mlflow`: exchange a run's data with other tools."""

import io
import shutil
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from chronicle.cli.options import CommandResult, JsonOption, LogsOption, RunOption, need_run, settings_from
from chronicle.errors import ChronicleError, UsageProblem
from chronicle.paths import RunPaths
from chronicle.report.markup import write_page
from chronicle.story import Story, read_story

__all__ = [
    "Format",
    "app",
    "export",
    "import_",
]

class Format(StrEnum):
    """The formats of an export."""

    CSV = "csv"
    JSON = "json"
    JSONL = "jsonl"
    PARQUET = "parquet"
    TENSORBOARD = "tensorboard"


def export(
    format_name: Annotated[
        Format, typer.Option("--format", "-f", help="Format of the output; json is one array, jsonl one row per line.")
    ] = Format.CSV,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File, or directory for TensorBoard [stdout].")] = None,
    every: Annotated[bool, typer.Option("--all", help="Export also abandoned steps, marked `kept` 0.")] = False,
    run: RunOption = None,
    logs: LogsOption = None,
    json: JsonOption = False,
) -> CommandResult:
    """Export the metrics of the lineage, each step once.

    Each step comes from the launch that the present weights descend from.

    Example: chronicle export --format tensorboard -o tb
    """
    settings = need_run(settings_from(run, logs))
    story = read_story(settings.paths)
    if out is None and format_name in (Format.PARQUET, Format.TENSORBOARD):
        raise UsageProblem(f"--format {format_name.value} cannot be written to stdout", "name a file or directory with -o")
    about = {"run": settings.run, "format": format_name.value, "inferred": story.lineage.inferred}
    if format_name is Format.TENSORBOARD:
        assert out is not None
        count = _tensorboard(story, settings.paths, out)
    else:
        count, text = _table(story, settings.paths, format_name, out, every=every)
        if out is None:
            return CommandResult(text=text, data={**about, "rows": count})
    data = {**about, "rows": count, "path": str(out)}
    return CommandResult(text=str(out), data=data, talk=(f"{count} rows",))


def _table(story: Story, paths: RunPaths, name: Format, out: Path | None, *, every: bool) -> tuple[int, str]:
    from chronicle.integrations.exports import (
        canonical_rows,
        channel_names,
        write_csv,
        write_json,
        write_jsonl,
        write_parquet,
    )

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
    from chronicle.integrations.exports import canonical_rows, write_tensorboard

    if out.exists():
        ours = out.is_dir() and all(p.name.endswith(".chronicle") for p in out.iterdir())
        if not ours:
            raise ChronicleError(f"`{out}` exists and chronicle did not write it", "name another directory with -o")
        shutil.rmtree(out)  # event files of an earlier export: TensorBoard would read both
    return write_tensorboard(canonical_rows(paths, story.lineage, abandoned=True), story.lineage, out)


# --- chronicle import


def import_(
    sources: Annotated[
        list[str], typer.Argument(help="Files or directories in order of time, or an MLflow run id.", metavar="SOURCE…")
    ],
    format_name: Annotated[
        str | None,
        typer.Option("--as", help="entries, chronicle, events, tensorboard, trainer-state, log or mlflow.", metavar="FORMAT"),
    ] = None,
    uri: Annotated[str | None, typer.Option(help="MLflow tracking store for --as mlflow.")] = None,
    run: RunOption = None,
    logs: LogsOption = None,
    json: JsonOption = False,
) -> CommandResult:
    """Import an old run: TensorBoard, CSV, MLflow, logs, Markdown.

    Sources: TensorBoard, W&B and other CSV, MLflow, trainer_state.json, logs, journal entries, a chronicles.md.

    Example: chronicle import runs/tensorboard --run old-run && chronicle report --run old-run
    """
    settings = settings_from(run, logs)
    lines, records = [], []
    for source in sources:
        text, record = _import(settings.paths, source, format_name, uri)
        lines.append(text)
        records.append(record)
    found, events = _scan_imported(settings.paths)
    lines += found
    lines.append(f"show it with `chronicle log --graph --run {settings.run}` or `chronicle report --run {settings.run}`")
    return CommandResult(text="\n".join(lines), data={"run": settings.run, "imports": records, "events": events})


def _scan_imported(paths: RunPaths) -> tuple[list[str], list[dict[str, object]]]:
    """Scan what the run holds now; an import without a curve, or without a loss, has nothing to scan."""
    from chronicle.metrics.readers import NothingToWatch
    from chronicle.watch.scan import describe_event, scan_run
    from rollback.detect import Tier

    try:
        scan = scan_run(paths, None)
    except NothingToWatch as problem:
        return [f"not scanned: {problem.message}"], []
    if not scan.rows:
        return [], []
    loud = [event for event in scan.events if event.tier is not Tier.NOTICE]
    quiet = len(scan.events) - len(loud)
    lines = [f"scanned: {len(scan.events)} events" + (f", {quiet} of them notices (`chronicle spikes`)" if quiet else "")]
    return [*lines, *(f"  {describe_event(event)}" for event in loud)], [event.to_json() for event in scan.events]


def _import(paths: RunPaths, source: str, format_name: str | None, uri: str | None) -> tuple[str, dict[str, object]]:
    from chronicle.integrations.importing import read_source, write_import
    from chronicle.metrics.readers import UnknownLog

    if format_name == "mlflow":
        if uri is None:
            raise UsageProblem("--as mlflow: expected the tracking store too", "name it with --uri sqlite:///mlflow.db")
        return _import_mlflow(paths, source, uri)
    path = Path(source)
    try:
        found = read_source(path, format_name)
    except UnknownLog as problem:
        way_out = "`chronicle spikes FILE` reads logs of any names that you give it"
        raise UsageProblem(problem.message, way_out) from None
    done = write_import(paths, found, path if path.exists() else source)
    return _told(source, found.format, done.entry_id, done.entries, done.launches, done.points)


def _import_mlflow(paths: RunPaths, run_id: str, uri: str) -> tuple[str, dict[str, object]]:
    from chronicle.integrations.importing import write_import
    from chronicle.integrations.mlflow import read_mlflow

    done = write_import(paths, read_mlflow(uri, run_id), run_id)
    return _told(run_id, "mlflow", done.entry_id, done.entries, done.launches, done.points)


def _told(
    source: str, name: str, entry: str | None, entries: int, launches: int, points: int
) -> tuple[str, dict[str, object]]:
    record: dict[str, object] = {"source": source, "format": name, "entry": entry}
    record |= {"entries": entries, "launches": launches, "points": points}
    if entry is None:
        return f"{source}: imported before, nothing changed", record
    return f"{source}: {entries} entries, {launches} launches, {points} points ({name})", record


# --- chronicle mlflow

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True, help="Copy the run into MLflow.")


@app.callback()
def _group() -> None:
    """Copy the run into MLflow."""


@app.command()
def sync(
    uri: Annotated[str | None, typer.Option(help="Tracking store [sqlite:///logs/mlflow.db].")] = None,
    run: RunOption = None,
    logs: LogsOption = None,
    json: JsonOption = False,
) -> CommandResult:
    """Send to MLflow what it does not have yet.

    MLflow gets one parent run, a nested run per launch, and the tag `abandoned_after`.

    Example: chronicle mlflow sync --uri http://127.0.0.1:5000
    """
    from chronicle.integrations.mlflow import Projection
    from chronicle.integrations.mlflow_process import MLFLOW_OFF, default_uri, store_of

    settings = need_run(settings_from(run, logs))
    store = store_of(uri or settings.mlflow_uri, settings.paths)
    if store == MLFLOW_OFF:
        origin = "--uri" if uri else settings.origin["mlflow_uri"]
        message = f"MLflow is turned off (`off` in {origin}): nothing was sent"
        raise UsageProblem(message, f"name the store to send to: --uri {default_uri(settings.paths)}")
    projection = Projection(settings.paths, store)
    sent = projection.feed()
    projection.attach_pages()
    data = {"run": settings.run, "uri": store, "values": sent}
    return CommandResult(text=f"{sent} metric values sent to {store}", data=data)

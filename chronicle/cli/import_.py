"""`chronicle import SOURCE…`: bring an old run in, whatever wrote it: the picture of it is one more command away."""

from pathlib import Path
from typing import Annotated

import typer

from chronicle.cli.options import JsonOption, LogsOption, RunOption, settings_from
from chronicle.cli.result import CommandResult
from chronicle.errors import UsageProblem
from chronicle.paths import RunPaths

__all__ = ["import_"]


def import_(
    sources: Annotated[
        list[str], typer.Argument(help="Files or directories in the order of time, or an MLflow run id.", metavar="SOURCE…")
    ],
    format_name: Annotated[
        str | None,
        typer.Option("--as", help="entries, chronicle, events, tensorboard, trainer-state, log, mlflow.", metavar="FORMAT"),
    ] = None,
    uri: Annotated[str | None, typer.Option(help="MLflow tracking store of --as mlflow.")] = None,
    run: RunOption = None,
    logs: LogsOption = None,
    json: JsonOption = False,
) -> CommandResult:
    """Import an old run: TensorBoard, W&B and other CSV, MLflow, trainer_state.json, logs, entries, a chronicles.md.

    Example: chronicle import runs/tensorboard --run old-run && chronicle report --run old-run
    """
    settings = settings_from(run, logs)
    lines, records = [], []
    for source in sources:
        text, record = _import(settings.paths, source, format_name, uri)
        lines.append(text)
        records.append(record)
    lines.append(f"see it with `chronicle log --graph --run {settings.run}` or `chronicle report --run {settings.run}`")
    return CommandResult(text="\n".join(lines), data={"run": settings.run, "imports": records})


def _import(paths: RunPaths, source: str, format_name: str | None, uri: str | None) -> tuple[str, dict[str, object]]:
    from chronicle.importers import read_source, write_import

    if format_name == "mlflow":
        if uri is None:
            raise UsageProblem("--as mlflow needs to know the store", "name it with --uri sqlite:///mlflow.db")
        return _import_mlflow(paths, source, uri)
    path = Path(source)
    found = read_source(path, format_name)
    done = write_import(paths, found, path if path.exists() else source)
    return _told(source, found.format, done.entry_id, done.entries, done.launches, done.points)


def _import_mlflow(paths: RunPaths, run_id: str, uri: str) -> tuple[str, dict[str, object]]:
    from chronicle.importers import write_import
    from chronicle.integrations.mlflow_store import read_mlflow

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

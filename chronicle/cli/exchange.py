"""`chronicle export` and `mlflow`: a run's data for other tools."""

import io
import shutil
from enum import StrEnum
from pathlib import Path

import typer

from chronicle.cli.options import IN_RUN, CommandResult, InRun, spread
from chronicle.errors import ChronicleError, UsageProblem
from chronicle.paths import RunPaths
from chronicle.report.markup import write_page
from chronicle.story import Story, read_story


class Format(StrEnum):
    """The formats of an export. The last three are directories."""

    CSV = "csv"
    JSONL = "jsonl"
    TENSORBOARD = "tensorboard"


def export(
    format_name: Format = Format.CSV,
    out: Path | None = None,
    every: bool = False,
    at: InRun = IN_RUN,
) -> CommandResult:
    """Export the metrics of the lineage, each step once.

    Each step comes from the launch that the present weights descend from.

    Example: chronicle export --format tensorboard -o tb

    Options:
      --format, -f: jsonl: a row a line; tensorboard: a directory.
      --out, -o: File, or directory for TensorBoard [stdout].
      --all: Export also abandoned steps, marked `kept` 0.
    """
    settings = at.existing()
    story = read_story(settings.paths)
    if out is None and format_name is Format.TENSORBOARD:
        raise UsageProblem(f"--format {format_name.value} cannot be written to stdout", "name a directory with -o")
    about = {"run": settings.run, "format": format_name.value, "inferred": story.lineage.inferred}
    if format_name is Format.TENSORBOARD:
        assert out is not None
        count = _tensorboard(story, settings.paths, out)
    else:
        count, text = _table(story, settings.paths, format_name, out, every=every)
        if out is None:
            return CommandResult(raw=text, data={**about, "rows": count})
    data = {**about, "rows": count, "path": str(out)}
    return CommandResult(raw=str(out), data=data, talk=(f"{count} rows",))


def _table(story: Story, paths: RunPaths, name: Format, out: Path | None, *, every: bool) -> tuple[int, str]:
    from chronicle.integrations.exports import write_csv, write_jsonl
    from chronicle.story.curve import canonical_rows, channel_names

    channels = channel_names(canonical_rows(paths, story.lineage, abandoned=every))
    rows = canonical_rows(paths, story.lineage, abandoned=every)
    text = io.StringIO()
    write = write_csv if name is Format.CSV else write_jsonl
    count = write(rows, channels, text)
    if out is not None:
        write_page(out, text.getvalue())
    return count, text.getvalue()


def _tensorboard(story: Story, paths: RunPaths, out: Path) -> int:
    from chronicle.integrations.exports import write_tensorboard
    from chronicle.story.curve import canonical_rows

    if out.exists():
        ours = out.is_dir() and all(p.name.endswith(".chronicle") for p in out.iterdir())
        if not ours:
            raise ChronicleError(f"`{out}` exists and chronicle did not write it", "name another directory with -o")
        shutil.rmtree(out)  # event files of an earlier export: TensorBoard would read both
    return write_tensorboard(canonical_rows(paths, story.lineage, abandoned=True), story.lineage, out)


# --- chronicle mlflow

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True, help="Copy the run into MLflow.")


@app.callback()
def _group() -> None:
    """Copy the run into MLflow."""


@app.command()
@spread
def sync(uri: str | None = None, at: InRun = IN_RUN) -> CommandResult:
    """Send to MLflow what it does not have yet.

    MLflow gets one parent run, a nested run per launch, and the tag `abandoned_after`.

    Example: chronicle mlflow sync --uri http://127.0.0.1:5000

    Options:
      --uri: Tracking store [sqlite:///logs/mlflow.db].
    """
    from chronicle.integrations.mlflow import Projection
    from chronicle.integrations.mlflow_process import MLFLOW_OFF, default_uri, store_of

    settings = at.existing()
    store = store_of(uri or settings.mlflow_uri, settings.paths)
    if store == MLFLOW_OFF:
        origin = "--uri" if uri else settings.origin["mlflow_uri"]
        message = f"MLflow is turned off (`off` in {origin}): nothing was sent"
        raise UsageProblem(message, f"name the store to send to: --uri {default_uri(settings.paths)}")
    projection = Projection(settings.paths, store)
    sent = projection.feed()
    projection.attach_pages()
    data = {"run": settings.run, "uri": store, "values": sent}
    return CommandResult(lines=f"{sent} metric values sent to {store}", data=data)

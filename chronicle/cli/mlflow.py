"""`chronicle mlflow sync`: send the run to MLflow, all of it or what is new; MLflow is a projection, never the truth."""

from typing import Annotated

import typer

from chronicle.cli.existing import need_run
from chronicle.cli.options import JsonOption, LogsOption, RunOption, settings_from
from chronicle.cli.result import CommandResult
from chronicle.errors import UsageProblem

__all__ = ["app"]

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True, help="Project the run into MLflow.")


@app.callback()
def _group() -> None:
    """Project the run into MLflow."""


@app.command()
def sync(
    uri: Annotated[str | None, typer.Option(help="Tracking store [sqlite:///logs/mlflow.db].")] = None,
    run: RunOption = None,
    logs: LogsOption = None,
    json: JsonOption = False,
) -> CommandResult:
    """Send to MLflow what it does not have yet: one parent run, one nested run a launch, tag `abandoned_after`.

    Example: chronicle mlflow sync --uri http://127.0.0.1:5000
    """
    from chronicle.integrations.mlflow_process import MLFLOW_OFF, default_uri
    from chronicle.integrations.mlflow import Projection

    settings = need_run(settings_from(run, logs))
    store = uri or settings.mlflow_uri or default_uri(settings.paths)
    if store == MLFLOW_OFF:
        origin = "--uri" if uri else settings.origin["mlflow_uri"]
        message = f"mlflow is switched off (`off` in {origin}): nothing was sent"
        raise UsageProblem(message, f"name the store to send to: --uri {default_uri(settings.paths)}")
    projection = Projection(settings.paths, store)
    sent = projection.feed()
    projection.attach_pages()
    data = {"run": settings.run, "uri": store, "values": sent}
    return CommandResult(text=f"{sent} metric values sent to {store}", data=data)

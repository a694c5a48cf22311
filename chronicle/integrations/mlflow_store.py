"""A run of an MLflow store by its address: metric histories as they were logged, cut where the step went back.

One run that was resumed holds both timelines in one history; the time stamps tell them apart. Runs nested under the
named run are launches of their own.
"""

from collections.abc import Iterator
from typing import Any

from chronicle.errors import ChronicleError
from chronicle.integrations.foreign_journals import Import, ImportedLaunch, cut_into_launches
from chronicle.metrics.mlflow_log import points_of

__all__ = ["read_mlflow"]


def read_mlflow(uri: str, run_id: str) -> Import:
    """All metrics of a run and of the runs nested under it; raises `ChronicleError` when the store has no such run."""
    try:
        from mlflow.tracking import MlflowClient
    except ModuleNotFoundError as problem:
        raise ChronicleError("mlflow is not installed", "pip install 'chronicle-ml[mlflow]'") from problem
    client = MlflowClient(tracking_uri=uri)
    try:
        run = client.get_run(run_id)
        query = f"tags.`mlflow.parentRunId` = '{run_id}'"
        nested = client.search_runs([run.info.experiment_id], query, order_by=["attributes.start_time"])
    except Exception as problem:
        raise ChronicleError(f"mlflow run `{run_id}`: {str(problem).splitlines()[0][:200]}") from problem
    launches = [part for found in (run, *nested) for part in _launches(client, found)]
    return Import(format="mlflow", launches=tuple(launches))


def _launches(client: Any, run: Any) -> Iterator[ImportedLaunch]:
    history = (m for key in run.data.metrics for m in client.get_metric_history(run.info.run_id, key))
    points = points_of((m.step, m.timestamp / 1000, m.key, m.value) for m in history)
    yield from cut_into_launches(points, run.info.run_name or run.info.run_id)

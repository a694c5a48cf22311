"""The per-step log: what a trainer measured, one line per step.

`log` writes and reads our own `metrics.jsonl`. `readers.read_log` opens the log of any known tool and hands it to its
reader: `records` (CSV, JSON), `lines` (printed lines), `tensorboard_log`, `mlflow_log`. Channel names are in
`rollback.channels`. No torch, mlflow or typer is imported here, and this module imports `log` only.
"""

from chronicle.metrics.log import MetricsWriter, Point, read_metrics

__all__ = ["MetricsWriter", "Point", "read_metrics"]

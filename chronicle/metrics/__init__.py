"""The per-step log: what a trainer measured, one line a step.

`log` writes and reads our own `metrics.jsonl`; `dialects` recognises log lines of other trainers; `readers` opens
whole files of other tools. No torch, mlflow, typer or rollback is imported here: a trainer pays only for a write.
"""

from chronicle.metrics.log import MetricsWriter, Point, read_metrics

__all__ = ["MetricsWriter", "Point", "read_metrics"]

"""The one honest curve, for every tool: each step once, from the launch that the present weights descend from.

`canonical` walks the lineage; `tables` writes CSV, JSON lines and Parquet; `tensorboard` writes event files whose purge
markers make TensorBoard show the same.
"""

from chronicle.integrations.exports import Row, canonical_rows
from chronicle.integrations.tables import write_csv, write_jsonl, write_parquet
from chronicle.integrations.tensorboard import write_tensorboard

__all__ = ["Row", "canonical_rows", "write_csv", "write_jsonl", "write_parquet", "write_tensorboard"]

"""The data plan: which sample is read at which step, recorded across restarts.

    plan      the order (keyed permutations), the exact mixture, and segments that record every skip and reshuffle
    shards    built sources on disk: tar shards, manifest
    shard_index   an index over anybody's shards, in place: tar, JSON lines, text; tables by their own libraries
    plan_dataset  samples of indexed shards in the plan's order, for any training script
    usage     what the lineage read: repeats, skips, re-reads
    observe   the same accounting for loaders of other libraries

No torch is imported here: `PlanDataset.loader` asks for it when it is called. The trainer's loaders are in bit_transformer.
"""

from chronicle.data.observe import Observer, RatioAlarm, observe
from chronicle.data.plan import DataPlan, PlanChanged, Segment, Segments, SourceSpec, step_digest
from chronicle.data.plan_dataset import PlanDataset
from chronicle.data.shard_index import Rows
from chronicle.errors import DataError

__all__ = [
    "DataError",
    "DataPlan",
    "Observer",
    "PlanChanged",
    "PlanDataset",
    "RatioAlarm",
    "Rows",
    "Segment",
    "Segments",
    "SourceSpec",
    "observe",
    "step_digest",
]

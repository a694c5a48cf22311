"""The data plan: which sample is read at which step, recorded across restarts.

    plan      the order (keyed permutations), the exact mixture, and segments that record every skip and reshuffle
    shards    built sources on disk: tar shards, offset indexes, manifest
    usage     what the lineage read: repeats, skips, re-reads
    observe   the same accounting for loaders of other libraries

No torch and no webdataset here: the loaders are in bit_transformer.
"""

from chronicle.data.observe import Observer, RatioAlarm, observe
from chronicle.data.plan import DataPlan, PlanChanged, Segment, Segments, SourceSpec, step_digest
from chronicle.errors import DataError

__all__ = [
    "DataError",
    "DataPlan",
    "Observer",
    "PlanChanged",
    "RatioAlarm",
    "Segment",
    "Segments",
    "SourceSpec",
    "observe",
    "step_digest",
]

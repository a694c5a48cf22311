"""Data as a plan: which sample is drawn at which step, for ever.

The order is arithmetic (`order`), the mixture is exact (`plan`), and every skip or reshuffle is a remembered segment
(`segments`). No torch and no webdataset here: the loaders live with the trainer.
"""

from chronicle.data.errors import DataError, PlanChanged
from chronicle.data.observe import Observer, RatioAlarm, observe
from chronicle.data.plan import DataPlan, SourceSpec, step_digest
from chronicle.data.segments import Segment, Segments

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

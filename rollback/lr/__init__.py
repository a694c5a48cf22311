"""The LR in a checkpoint: where it is stored, the edits that change it, the proof of their effect, the forecast.

Pure functions over plain dictionaries: no torch, no files, no clock. A plan uses them to show the next LRs before
anything is written, and to refuse an edit whose effect is not the requested one.
"""

from rollback.lr.authority import Doubt, lr_doubts
from rollback.lr.effect import FieldEdit, Proof, lr_edits, prove_ratio
from rollback.lr.oracle import Unknown, next_lrs
from rollback.lr.rules import CLOSED_FORM, SchedulerClass, infer_scheduler_class

__all__ = [
    "CLOSED_FORM",
    "Doubt",
    "FieldEdit",
    "Proof",
    "SchedulerClass",
    "Unknown",
    "infer_scheduler_class",
    "lr_doubts",
    "lr_edits",
    "next_lrs",
    "prove_ratio",
]

"""Where the LR of a run really lives, the edit that changes it, and the proof of its effect.

Everything here is a pure function over plain dictionaries: no torch, no files, no clock. The plan uses it to show the
next LRs before a byte is written, and to refuse an edit whose effect is not what was asked.
"""

from rollback.lr.effect import FieldEdit, Proof, lr_edits, prove_ratio
from rollback.lr.oracle import Unknown, next_lrs
from rollback.lr.rules import CLOSED_FORM, SchedulerClass, infer_scheduler_class

__all__ = [
    "CLOSED_FORM",
    "FieldEdit",
    "Proof",
    "SchedulerClass",
    "Unknown",
    "infer_scheduler_class",
    "lr_edits",
    "next_lrs",
    "prove_ratio",
]

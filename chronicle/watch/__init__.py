"""Runs the detector over logs: live beside a launch, following a growing log, or after the fact.

`live.LiveWatch` is polled by the supervisor and writes incidents and proposals to the journal. `follow` serves `chronicle
watch`, `scan` folds a log for it. The detector itself is `rollback.detect`.
"""

from chronicle.watch.live import LiveWatch

__all__ = ["LiveWatch"]

"""The flight envelope: what must stay true while a launch trains, watched from inside by samples.

`flight.py` decides when to look; `motion.py` (gradients and parameters; zeroing, accumulation, clipping), `structure.py` (tied
weights, modes, dtypes, the first forward passes) and `samples.py` (small samples, replicas) say what is wrong. A breach is an
incident in the journal with the step at which it began, once per kind; nothing here raises a refusal.
"""

from chronicle.resume.envelope.breach import Breach, BreachKind
from chronicle.resume.envelope.flight import Envelope

__all__ = ["Breach", "BreachKind", "Envelope"]

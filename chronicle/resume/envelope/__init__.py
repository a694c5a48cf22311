"""The flight envelope: what must stay true while a launch trains, watched from inside by samples.

`flight.py` decides when to look, and at tied weights, modes and dtypes; `motion.py` (gradients and parameters), `promises.py`
(zeroing, accumulation, clipping) and `replicas.py` say what is wrong. A breach is an
incident in the journal with the step at which it began, once per kind; nothing here raises a refusal.
"""

from chronicle.resume.envelope.breach import Breach, BreachKind, BreachLog
from chronicle.resume.envelope.flight import Envelope

__all__ = ["Breach", "BreachKind", "BreachLog", "Envelope"]

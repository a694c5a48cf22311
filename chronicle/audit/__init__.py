"""What the ranks themselves recorded, and sentences held against it.

A trainer calls `open_evidence()` in every rank and tells it what it sees: devices, counts, samples. `facts` reads that
back, `claims` answers SUPPORTED / CONTRADICTED / UNSUPPORTED. A plan, a target or a name is never evidence.
"""

from chronicle.audit.counts import ParameterCounts, count_parameters, describe_device
from chronicle.audit.rank import RankEvidence, open_evidence

__all__ = ["ParameterCounts", "RankEvidence", "count_parameters", "describe_device", "open_evidence"]

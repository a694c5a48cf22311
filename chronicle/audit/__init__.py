"""Evidence recorded by ranks, claims checked against it, and hardware events.

A trainer calls `open_evidence()` in every rank and reports devices, counts and samples. `evidence` reads the records
back; `claims` answers SUPPORTED, CONTRADICTED or NO EVIDENCE. A plan, a target or a name is not evidence.
"""

from chronicle.audit.rank import ParameterCounts, RankEvidence, count_parameters, describe_device, open_evidence

__all__ = ["ParameterCounts", "RankEvidence", "count_parameters", "describe_device", "open_evidence"]

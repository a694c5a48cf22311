"""Checks before a launch spends anything: PF01 to PF31, each pass, fail, warn or unknown, with what was read.

`facts.TrainerFacts` is what a trainer says about itself and its data; `catalogue` holds the pure checks over it;
`host` reads what needs no trainer (orphans, disk, ports, stray files). Unknown is unknown: no check passes for lack of
something to read.
"""

from chronicle.preflight.facts import DecodedSample, RankFacts, TrainerFacts
from chronicle.preflight.gate import PreflightFailed, check_before_first_step, check_facts
from chronicle.preflight.host import available_memory
from chronicle.preflight.results import CheckResult, CheckVerdict

__all__ = [
    "CheckResult",
    "CheckVerdict",
    "DecodedSample",
    "PreflightFailed",
    "RankFacts",
    "TrainerFacts",
    "available_memory",
    "check_before_first_step",
    "check_facts",
]

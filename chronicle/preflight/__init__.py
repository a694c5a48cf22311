"""Checks before a launch spends GPU hours: PF01 to PF31, each pass, fail, warn or unknown, with the data it read.

`facts.py`: what a trainer says about itself. `model_checks.py`, `data_checks.py`: checks of those facts. `host.py`: checks of
the machine, which need no trainer. `gate.py`: the catalogue in order, called inside the ranks. `full.py`: what only
`preflight --full` needs. A check with nothing to read is `unknown`, which is no pass.
"""

from chronicle.preflight.facts import DecodedSample, RankFacts, TrainerFacts
from chronicle.preflight.gate import check_before_first_step, check_facts
from chronicle.preflight.host import available_memory
from chronicle.preflight.results import CheckResult, CheckVerdict, PreflightFailed

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

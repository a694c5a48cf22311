"""Checks before a launch spends GPU hours: PF01 to PF31, each pass, fail, warn or unknown, with the data it read.

`facts.py`: what a trainer says about itself. `fact_checks.py`: the table of checks of those facts. `host.py`: checks of the
machine, which need no trainer. `gate.py`: called inside the ranks. A check with
nothing to read is `unknown`, which is no pass. Whether a script resumes exactly is `chronicle rehearse`'s to show.
"""

from chronicle.preflight.facts import RankFacts, TrainerFacts
from chronicle.preflight.gate import check_before_first_step, check_facts
from chronicle.preflight.results import CheckResult, CheckVerdict, PreflightFailed

__all__ = [
    "CheckResult",
    "CheckVerdict",
    "PreflightFailed",
    "RankFacts",
    "TrainerFacts",
    "check_before_first_step",
    "check_facts",
]

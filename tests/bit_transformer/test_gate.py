"""The gate is blind during burn-in and trips after it; what is no number closes it at once."""

import json
import math

import pytest

from bit_transformer.errors import GateTripped
from bit_transformer.evaluation.gate import GateConfig, GateState, HeldOutGate, Limit, SmoothedGate


def test_gate_ignores_noise_during_burn_in() -> None:
    """Ten wild values first: no verdict; then the smoothed value decides."""
    gate = SmoothedGate(limits={"loss": Limit(ceiling=1.0)}, burn_in=10)
    assert {gate.observe({"loss": 50.0 if i % 2 else 0.1}).state for i in range(10)} == {GateState.BURN_IN}


def test_gate_trips_on_a_planted_divergence_within_a_known_number_of_steps() -> None:
    """From 0.5 to 2.0 at decay 0.9: the average passes 1.0 after four observations, not on the first."""
    gate = SmoothedGate(limits={"loss": Limit(ceiling=1.0)}, burn_in=10, strict=False)
    calm = [gate.observe({"loss": 0.5}).state for _ in range(20)]
    assert calm == [GateState.BURN_IN] * 10 + [GateState.OK] * 10
    assert [gate.observe({"loss": 2.0}).state for _ in range(5)] == [GateState.OK] * 3 + [GateState.TRIPPED] * 2


def test_strict_gate_raises_and_soft_gate_names_what_is_at_fault() -> None:
    """One sentence with value and limit, of each value that is at fault."""
    limits = {"c": Limit(ceiling=0.3), "s": Limit(ceiling=0.5)}
    soft, strict = (SmoothedGate(limits=limits, burn_in=0, strict=s) for s in (False, True))
    assert soft.observe({"c": 0.4, "s": 0.2}).why == "smoothed c is 0.4 after 1 observations, expected below 0.3"
    with pytest.raises(GateTripped, match=r"smoothed c is 0.4 after 1 observations, expected below 0.3"):
        strict.observe({"c": 0.4, "s": 0.2})


def test_gate_state_survives_a_restart() -> None:
    """A resumed gate does not burn in again and trips where the first would have."""
    one, other = (HeldOutGate(GateConfig(burn_in=3)) for _ in range(2))
    for _ in range(5):
        one.observe(4.0)
    other.load(json.loads(json.dumps(one.to_json())))
    told = [(one.observe(9.0), one.verdict) for _ in range(6)]
    assert told == [(other.observe(9.0), other.verdict) for _ in range(6)] and sum(changed for changed, _ in told) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_no_number_closes_the_gate_at_once_and_blinds_nothing(value: float) -> None:
    """Also in the burn-in; the average keeps to finite values, so that what comes after is judged as before."""
    gate = SmoothedGate(limits={"loss": Limit(ceiling=1.3)}, decay=0.9, burn_in=3, strict=False)
    states = [gate.observe({"loss": one}).state for one in (1.0, value, 1.0, 1.0, 1.0)]
    assert states == [GateState.BURN_IN, GateState.TRIPPED, GateState.BURN_IN, GateState.OK, GateState.OK]
    assert [gate.observe({"loss": 9.0}).state for _ in range(3)] == [GateState.TRIPPED] * 3
    strict = SmoothedGate(limits={"loss": Limit(ceiling=1.3)}, burn_in=3, strict=True)
    with pytest.raises(GateTripped, match=r"loss is (nan|inf)"):
        strict.observe({"loss": value})


def test_the_runs_gate_ends_a_strict_launch_at_the_first_evaluation_that_is_no_number() -> None:
    """Also in the burn-in, and the best value stays."""
    gate = HeldOutGate(GateConfig(mode="strict", burn_in=10))
    assert not gate.observe(4.0)
    assert gate.observe(math.nan) and gate.best == 4.0
    with pytest.raises(GateTripped, match="tripped: held-out bpb over its best is nan"):
        gate.require_open()

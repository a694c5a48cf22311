"""The gate is blind during burn-in and trips after it; what is no number closes it at once."""

import json
import math

import pytest

from bit_transformer.errors import GateTripped
from bit_transformer.evaluation.gate import GateConfig, GateState, HeldOutGate

NAN, INFINITE = float("nan"), float("inf")


def observed(gate: HeldOutGate, *values: float) -> list[GateState]:
    """The state after each evaluation."""
    states = []
    for value in values:
        gate.observe(value)
        states.append(gate.state)
    return states


def test_gate_ignores_noise_during_burn_in() -> None:
    """Ten wild values first: no verdict; then the smoothed value decides."""
    gate = HeldOutGate(GateConfig(burn_in=10, max_ratio=1.1))
    assert set(observed(gate, *(50.0 if i % 2 else 0.1 for i in range(10)))) == {GateState.BURN_IN}
    assert observed(gate, 50.0) == [GateState.TRIPPED]


def test_gate_trips_on_a_planted_divergence_within_a_known_number_of_steps() -> None:
    """From 0.5 to 2.0 at decay 0.9: the average of the ratio passes 2 after four observations, not on the first."""
    gate = HeldOutGate(GateConfig(burn_in=10, max_ratio=2.0))
    assert observed(gate, *[0.5] * 20) == [GateState.BURN_IN] * 10 + [GateState.OK] * 10
    assert observed(gate, *[2.0] * 5) == [GateState.OK] * 3 + [GateState.TRIPPED] * 2


def test_strict_gate_raises_and_soft_gate_names_what_is_at_fault() -> None:
    """One sentence with value and limit."""
    said = "smoothed held-out bpb over its best is 1.4 after 2 observations, expected below 1.3"
    soft, strict = (HeldOutGate(GateConfig(mode=mode, burn_in=0)) for mode in ("soft", "strict"))
    for gate in (soft, strict):
        assert [gate.observe(1.0), gate.observe(5.0)] == [False, True] and gate.why == said
    soft.require_open()
    with pytest.raises(GateTripped, match=said):
        strict.require_open()


def test_gate_state_survives_a_restart() -> None:
    """A resumed gate does not burn in again and trips where the first would have."""
    one, other = (HeldOutGate(GateConfig(burn_in=3)) for _ in range(2))
    for _ in range(5):
        one.observe(4.0)
    other.load(json.loads(json.dumps(one.to_json())))
    told = [(one.observe(9.0), one.state, one.why) for _ in range(6)]
    assert told == [(other.observe(9.0), other.state, other.why) for _ in range(6)]
    assert sum(changed for changed, *_ in told) == 1


@pytest.mark.parametrize("value", [NAN, INFINITE])
def test_a_value_that_is_no_number_closes_the_gate_at_once_and_blinds_nothing(value: float) -> None:
    """Also in the burn-in; the average keeps to finite values, so that what comes after is judged as before."""
    gate = HeldOutGate(GateConfig(mode="strict", burn_in=3))
    states = observed(gate, 1.0, value, 1.0, 1.0, 1.0)
    assert states == [GateState.BURN_IN, GateState.TRIPPED, GateState.BURN_IN, GateState.OK, GateState.OK]
    assert observed(gate, *[9.0] * 3) == [GateState.TRIPPED] * 3
    gate.observe(value)
    with pytest.raises(GateTripped, match=r"over its best is (nan|inf)"):
        gate.require_open()


def test_the_runs_gate_ends_a_strict_launch_at_the_first_evaluation_that_is_no_number() -> None:
    """Also in the burn-in, and the best value stays."""
    gate = HeldOutGate(GateConfig(mode="strict", burn_in=10))
    assert not gate.observe(4.0)
    assert gate.observe(math.nan) and gate.best == 4.0
    with pytest.raises(GateTripped, match="tripped: held-out bpb over its best is nan"):
        gate.require_open()

"""K, C, S tell the classes of data apart; the gate is blind during burn-in and trips after it."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from bit_transformer.data.bits import encode_bytes
from bit_transformer.data.corpora import read_corpus
from bit_transformer.errors import GateTripped
from bit_transformer.evaluation.gate import GateConfig, GateState, Limit, Monitor, SmoothedGate
from bit_transformer.evaluation.telemetry import (
    Telemetry,
    agreement,
    calibrate,
    certainty_of_input,
    certainty_of_output,
    complexity,
    constant_channels,
    count_phrases,
    flip_rate,
    measure,
    place_frequencies,
)

WINDOW = 256


def _windows(data: bytes, count: int = 1) -> torch.Tensor:
    return encode_bytes(torch.from_numpy(np.frombuffer(data[: WINDOW * count], dtype=np.uint8).copy()).view(count, -1))


def test_phrases_are_those_of_the_1976_paper() -> None:
    """Lempel and Ziv's own example: 0001101001000101 has six phrases 0|001|10|100|1000|101."""
    assert count_phrases(np.array([int(c) for c in "0001101001000101"], dtype=np.uint8)) == 6


def test_complexity_separates_repetition_text_and_noise() -> None:
    """Zeros, `0101…` and repeated words near 0, code in the middle, noise near 1; the flip rate cannot do that."""
    alternating = (torch.arange(WINDOW * 9) % 2)[None]
    noise = _windows(np.random.default_rng(0).bytes(WINDOW))
    code = _windows(read_corpus("code").train[5000:], 1)
    assert complexity(_windows(bytes(WINDOW))).item() < 0.03
    assert complexity(alternating).item() < 0.03 and flip_rate(alternating).item() == 1.0
    assert complexity(_windows(b"abcabc" * 100)).item() < 0.1
    assert 0.25 < complexity(code).item() < 0.9
    assert complexity(noise).item() > 0.95


def test_certainty_of_zeros_is_one_and_of_noise_none() -> None:
    """K of the input follows the share of ones; K of the output follows what the model says."""
    assert certainty_of_input(torch.zeros(1, 90, dtype=torch.long)).item() == 1.0
    assert certainty_of_input((torch.arange(90) % 2)[None]).item() == pytest.approx(0.0)
    assert certainty_of_output(torch.zeros(1, 90, 2)).item() == pytest.approx(0.0)
    assert certainty_of_output(torch.tensor([30.0, -30.0]).expand(1, 90, 2)).item() == pytest.approx(1.0)


def test_agreement_is_one_for_the_datas_own_marginals_and_falls_away_from_them() -> None:
    """A model that predicts each place's frequency scores 1; one that predicts the opposite scores less."""
    frequencies = place_frequencies(_windows(read_corpus("code").train, 8))
    place = (torch.arange(WINDOW * 9) + 1) % 9
    p = frequencies[place].clamp(1e-6, 1 - 1e-6)
    own = torch.stack([(1 - p).log(), p.log()], -1)[None]
    assert agreement(own, frequencies).item() == pytest.approx(1.0, abs=1e-6)
    assert agreement(own.flip(-1), frequencies).item() < 0.8


def test_calibrated_floor_flags_almost_no_ordinary_window() -> None:
    """The published floor of 0.3 flags ordinary code; the one taken from the data flags what it says."""
    windows = _windows(read_corpus("code").train[100_000:], 200)
    rows = [Telemetry(k=0, c=c, s=0.9, flip_rate=0.5) for c in complexity(windows).tolist()]
    floors = calibrate(rows, quantile=0.01)
    assert sum(row.c < floors.c_floor for row in rows) <= 2
    assert "1.0% quantile of 200 training windows" in floors.source


def test_a_number_that_never_moves_is_reported() -> None:
    """S constant over every window measures nothing: named, as the published run's S of 0.460 should have been."""
    rows = [Telemetry(k=0.1 * i, c=0.5 + 0.01 * i, s=0.46, flip_rate=0.5 + 0.02 * i) for i in range(5)]
    assert constant_channels([dataclasses.asdict(row) for row in rows]) == ("s",)
    assert constant_channels([dataclasses.asdict(rows[0])]) == ()


def test_measure_gives_one_row_a_window() -> None:
    """All four numbers, finite, for each window."""
    bits = _windows(read_corpus("code").train, 3)
    logits = torch.randn(3, WINDOW * 9, 2)
    rows = measure(bits, certainty_of_output(logits), agreement(logits, place_frequencies(bits)))
    assert len(rows) == 3 and all(0 <= row.k <= 1 and 0 <= row.s <= 1 and 0 < row.c <= 1.2 for row in rows)


def test_gate_ignores_noise_during_burn_in() -> None:
    """Ten wild values first: no verdict; then the smoothed value decides."""
    gate = SmoothedGate(limits={"loss": Limit(ceiling=1.0)}, burn_in=10)
    assert {gate.observe({"loss": 50.0 if i % 2 else 0.1}).state for i in range(10)} == {GateState.BURN_IN}


def test_gate_trips_on_a_planted_divergence_within_a_known_number_of_steps() -> None:
    """From 0.5 to 2.0 at decay 0.9: the average passes 1.0 after four observations, not on the first."""
    gate = SmoothedGate(limits={"loss": Limit(ceiling=1.0)}, burn_in=10, strict=False)
    calm = [gate.observe({"loss": 0.5}).state for _ in range(20)]
    assert calm == [GateState.BURN_IN] * 10 + [GateState.OK] * 10
    states = [gate.observe({"loss": 2.0}).state for _ in range(4)]
    assert states[0] is GateState.OK and states[2] is GateState.WARN and states[3] is GateState.TRIPPED


def test_strict_gate_raises_and_soft_gate_names_what_is_at_fault() -> None:
    """Strict: one sentence with value and limits. Soft: the name at fault."""
    limits = {"c": Limit(floor=0.3), "s": Limit(floor=0.5)}
    soft, strict = (SmoothedGate(limits=limits, burn_in=0, strict=s) for s in (False, True))
    verdict = soft.observe({"c": 0.2, "s": 0.9})
    assert verdict.tripped == ("c",)
    with pytest.raises(GateTripped, match=r"smoothed c is 0.2 after 1 observations, expected above 0.3"):
        strict.observe({"c": 0.2, "s": 0.9})


def test_gate_state_survives_a_restart() -> None:
    """A resumed gate does not burn in again and trips where the first would have."""
    one, other = (SmoothedGate(limits={"loss": Limit(ceiling=1.0)}, burn_in=3, strict=False) for _ in range(2))
    for _ in range(5):
        one.observe({"loss": 0.5})
    other.load_state_dict(one.state_dict())
    assert [one.observe({"loss": 3.0}) for _ in range(4)] == [other.observe({"loss": 3.0}) for _ in range(4)]


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


def test_the_runs_monitor_ends_a_strict_launch_at_the_first_evaluation_that_is_no_number() -> None:
    monitor = Monitor(GateConfig(mode="strict", burn_in=10), windows=0)
    monitor.observe(4.0, {})
    notices = monitor.observe(math.nan, {})
    assert "tripped" in notices[0].text and monitor.best == 4.0
    with pytest.raises(GateTripped, match="nan"):
        monitor.require_ok()

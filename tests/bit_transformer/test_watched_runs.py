"""Gate, quantisation and growth in real tiny launches: called by the loop, told in the journal, kept by a resume."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from chronicle.journal import Entry, read_journal
from chronicle.paths import RunPaths
from tests.bit_transformer.launches import job, read_lines, run_jobs

CALM = ("warmup_steps=0", "decay_steps=0", "eval_windows=32")
ALL_AT_ONCE: dict[str, tuple[str, ...]] = {
    "diverges": (*CALM, "total_steps=40", "eval_every=2",
                 "optimizer.lr=0.01", "raise_step=16", "raise_factor=300.0",
                 "gate.burn_in=4", "gate.decay=0.5", "gate.max_ratio=1.05"),
    "growth": (*CALM, "total_steps=10", "eval_every=2", "shape=plateau", "plateau_patience=1", "plateau_min_gain=5.0",
               "norm=pre", "growth=('depth', 'width')"),
    "qat": (*CALM, "total_steps=40", "eval_every=20", "qat_from_step=20", "export=true", "summary=true",
            "optimizer.lr=0.003"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One launch of each kind, in one process."""
    root = tmp_path_factory.mktemp("watched")
    done = run_jobs([job(root / name, *settings) for name, settings in ALL_AT_ONCE.items()])
    (root / "stderr").write_text(done.stderr)
    (root / "stdout").write_text(done.stdout)
    return root


def _entries(root: Path, name: str, kind: str) -> list[Entry]:
    return [entry for entry in read_journal(RunPaths(root / name / "run")).entries if entry.kind == kind]


def test_gate_says_when_the_held_out_loss_leaves_its_best(runs: Path) -> None:
    """A divergence after the burn-in: tripped is said once, in soft mode the launch goes on to its end."""
    states = [(entry.step, entry.data["state"]) for entry in _entries(runs, "diverges", "gate")]
    assert states and [state for _, state in states if state == "tripped"] == ["tripped"]
    assert min(step for step, state in states if state == "tripped" and step) > 16
    assert [line["step"] for line in read_lines(runs / "diverges/launch/metrics.jsonl")][-1] == 40


def test_strict_gate_ends_the_launch_before_it_saves(tmp_path: Path) -> None:
    """The same divergence in strict mode, two ranks: one sentence and code 1 on both, no checkpoint of what tripped it."""
    done = run_jobs([job(tmp_path, *ALL_AT_ONCE["diverges"], "gate.mode=strict", "checkpoint_every=4")],
                    num_processes=2, check=False)
    assert done.returncode != 0 and "GateTripped" not in done.stderr
    assert done.stderr.count("error: tripped: smoothed held-out bpb over its best") == 2
    tripped = _entries(tmp_path, ".", "gate")[-1]
    saved = max(int(path.name.removeprefix("opt_step-")) for path in (tmp_path / "checkpoints").iterdir())
    assert tripped.data["state"] == "tripped" and saved < (tripped.step or 0)


def test_growth_at_a_plateau_keeps_the_function(runs: Path) -> None:
    """Depth, then width: the held-out loss goes on where it was, the LR is lower."""
    grown = _entries(runs, "growth", "growth")
    assert [(entry.step, entry.data["kind"]) for entry in grown] == [(4, "depth"), (6, "width")]
    lines = {line["step"]: line for line in read_lines(runs / "growth/launch/metrics.jsonl")}
    assert lines[8]["eval_bpb"] == pytest.approx(lines[6]["eval_bpb"], abs=0.2)
    assert lines[5]["lr"] == pytest.approx(0.012 / 2**0.5 / 100)  # 1/√2, first of a hundred warm-up steps
    assert lines[7]["lr"] == pytest.approx(0.012 / 2 / 100)


def test_export_is_measured_beside_float32_and_lies_outside_the_checkpoints(runs: Path) -> None:
    """After training for four bits: half the bytes or less, within two percent; printed, journalled, written."""
    rows = {row["name"]: row for row in _entries(runs, "qat", "export")[0].data["rows"]}
    assert rows["int8"]["bpb"] == pytest.approx(rows["float32"]["bpb"], rel=0.02)
    assert rows["int8"]["bytes"] < rows["float32"]["bytes"] / 2
    weights = load_file(runs / "qat/launch/export/int8.safetensors")
    assert weights["blocks.0.feedforward.0.weight"].dtype == torch.int8
    assert all(len(row.unique()) <= 16 for row in weights["blocks.0.feedforward.0.weight"])  # the levels it was trained with
    assert not list((runs / "qat/checkpoints").rglob("int*"))
    assert ", int8 " in (runs / "stdout").read_text()


def test_end_of_a_run_puts_the_model_beside_its_yardsticks(runs: Path) -> None:
    """Coin flip, unigram, order 3, xz and zstd on the same held-out bytes."""
    told = (runs / "stdout").read_text()
    assert "the same held-out text for every row: code 256 bytes, reference 256 bytes, in windows of 8" in told
    for name in ("model", "coin flip", "unigram", "order 3", "xz", "zstd"):
        assert f"\n{name:<20}" in told


def test_metrics_are_plain_json(runs: Path) -> None:
    """Every line of every run parses, without a bare NaN."""
    for path in runs.rglob("metrics.jsonl"):
        assert all(json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines())

"""n steps, a restart in fresh processes and n more steps equal 2n steps, bit for bit.

What is compared: every weight, every optimizer tensor, the LR, the loss and the digest of the samples of every step;
for float32 and bf16, with and without accumulation, with the compression ramp, ACT and reversible blocks.
"""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.bit_transformer.launches import job, read_lines, run_jobs

CELLS = [*product(("no", "bf16"), (1, 4), ("plain",)), ("no", 1, "ramp"), ("no", 4, "act"), ("bf16", 1, "reversible")]
EXTRA = {"plain": (), "ramp": ("compress_end=0.5", "compress_ramp_steps=6"),
         "act": ("act=true", "num_layers=2", "compress_end=0.5", "compress_ramp_steps=6"),
         "reversible": ("norm=pre", "reversible=true", "act=true", "num_layers=2", "chunk=32", "overlap=8")}
HALF, WHOLE = 4, 8


def _settings(precision: str, accumulation: int, extra: str) -> tuple[str, ...]:
    return (*EXTRA[extra], f"mixed_precision={precision}", f"accumulation_steps={accumulation}", f"total_steps={WHOLE}")


@pytest.fixture(scope="module", params=[1, 2], ids=["single", "ddp2"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cells trained straight and in two halves; the halves in different processes."""
    root = tmp_path_factory.mktemp("exact")
    first, second = [], []
    for cell in CELLS:
        settings = _settings(*cell)
        directory = root / "-".join(map(str, cell))
        first += [job(directory / "straight", *settings), job(directory / "halves", *settings, stop_at=HALF)]
        second += [job(directory / "halves", *settings, launch="again")]
    run_jobs(first, num_processes=request.param)
    run_jobs(second, num_processes=request.param)
    return root


def _state(directory: Path) -> dict[str, Any]:
    path = directory / "checkpoints" / f"opt_step-{WHOLE}" / "accelerator_state"
    return {"weights": load_file(path / "model.safetensors"),
            "optimizer": torch.load(path / "optimizer.bin", weights_only=True)["state"],
            "schedule": torch.load(path / "custom_checkpoint_0.pkl", weights_only=True),
            "progress": torch.load(path / "custom_checkpoint_1.pkl", weights_only=True)}


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(map(str, cell)))
def test_restart_changes_no_bit(trained: Path, cell: tuple[str, int, str]) -> None:
    """Weights, moments, schedule and progress after 2n steps are the same with and without a restart."""
    directory = trained / "-".join(map(str, cell))
    straight, halves = _state(directory / "straight"), _state(directory / "halves")
    assert straight["weights"].keys() == halves["weights"].keys()
    assert all(torch.equal(straight["weights"][name], halves["weights"][name]) for name in straight["weights"])
    assert all(torch.equal(straight["optimizer"][index][name], halves["optimizer"][index][name])
               for index in straight["optimizer"] for name in ("exp_avg", "exp_avg_sq", "step"))
    assert straight["schedule"] == halves["schedule"]
    assert straight["progress"] == halves["progress"]
    assert straight["schedule"]["last_epoch"] == WHOLE


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(map(str, cell)))
def test_restart_changes_no_logged_value(trained: Path, cell: tuple[str, int, str]) -> None:
    """Loss, LR, gradient norm and sample digest of every step are the same with and without a restart."""
    directory = trained / "-".join(map(str, cell))
    kept = ("step", "loss", "lr", "grad_norm", "loss/code", "tokens")

    def values(*paths: Path) -> list[dict[str, Any]]:
        return [{name: line.get(name) for name in kept} for path in paths for line in read_lines(path / "metrics.jsonl")]

    halves = directory / "halves"
    assert values(directory / "straight" / "launch") == values(halves / "launch", halves / "again")
    assert read_lines(directory / "straight" / "launch" / "samples.jsonl") == [
        *read_lines(halves / "launch" / "samples.jsonl"), *read_lines(halves / "again" / "samples.jsonl")]
    assert [line["step"] for line in values(directory / "straight" / "launch")] == list(range(1, WHOLE + 1))

"""n steps, a restart in fresh processes and n more steps equal 2n steps, bit for bit.

What is compared: every weight, every optimizer tensor, the LR, the loss and the digest of the samples of every step;
for one process, DDP, FSDP2 and ZeRO 1 to 3 on two ranks, float32 and bf16, with and without accumulation, with the
compression ramp, ACT and reversible blocks.
"""

import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.bit_transformer.launches import job, read_lines, run_jobs

HALF, WHOLE = 4, 8
EXTRA: dict[str, tuple[str, ...]] = {
    "plain": (),
    "ramp": ("compress_end=0.5", "compress_ramp_steps=6"),
    "act": ("act=true", "num_layers=2", "compress_end=0.5", "compress_ramp_steps=6", "ema_decay=0.9"),
    "reversible": ("norm=pre", "reversible=true", "act=true", "num_layers=2", "chunk=32", "overlap=8"),
    "plateau": ("shape=plateau", "decay_steps=0", "eval_every=1", "plateau_patience=1", "plateau_min_gain=1.0"),
    **{kind: (f"sharding={kind}", "ema_decay=0") for kind in ("fsdp2", "zero1", "zero2", "zero3")},
}
Cell = tuple[str, int, str]
SINGLE: list[Cell] = [*product(("no", "bf16"), (1, 4), ("plain",)), ("no", 1, "ramp"), ("no", 4, "act"),
                      ("bf16", 1, "reversible"), ("no", 1, "plateau")]
TWO_RANKS: list[Cell] = [("no", 1, "plain"), ("bf16", 4, "plain"), ("no", 4, "act"), ("no", 1, "fsdp2"),
                         ("bf16", 4, "fsdp2")]
MORE: list[Cell] = [("no", 4, "plain"), ("bf16", 1, "plain"), ("no", 1, "ramp"), ("bf16", 1, "reversible"),
                    ("no", 4, "fsdp2"), ("bf16", 1, "fsdp2")]
ZERO: list[Cell] = [("no", 1, "zero1"), ("no", 4, "zero2")]  # what else there is of ZeRO is refused (`zero.plan_zero`)


def _name(cell: Cell) -> str:
    return "-".join(map(str, cell))


def _train(root: Path, cells: list[Cell], num_processes: int) -> Path:
    """Train every cell straight and in two halves; the halves in different processes."""
    first, second = [], []
    for cell in cells:
        precision, accumulation, extra = cell
        settings = (f"mixed_precision={precision}", f"accumulation_steps={accumulation}", f"total_steps={WHOLE}",
                    *EXTRA[extra])
        directory = root / _name(cell)
        first += [job(directory / "straight", *settings), job(directory / "halves", *settings, stop_at=HALF)]
        second += [job(directory / "halves", *settings, launch="again")]
    run_jobs(first, num_processes=num_processes)
    run_jobs(second, num_processes=num_processes)
    return root


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cells of one process."""
    return _train(tmp_path_factory.mktemp("single"), SINGLE, 1)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cells of two ranks that every test run checks."""
    return _train(tmp_path_factory.mktemp("ranks"), TWO_RANKS, 2)


@pytest.fixture(scope="module")
def more_cells(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rest of the two-rank matrix."""
    return _train(tmp_path_factory.mktemp("more"), MORE, 2)


def _state(directory: Path) -> dict[str, Any]:
    path = directory / "checkpoints" / f"opt_step-{WHOLE}" / "accelerator_state"
    return {"weights": load_file(path / "model.safetensors"),
            "optimizer": torch.load(path / "optimizer.bin", weights_only=True)["state"],
            "schedule": torch.load(path / "custom_checkpoint_0.pkl", weights_only=True),
            "progress": torch.load(path / "custom_checkpoint_1.pkl", weights_only=True)}


def _require_equal_states(directory: Path) -> None:
    straight, halves = _state(directory / "straight"), _state(directory / "halves")
    assert straight["weights"].keys() == halves["weights"].keys()
    assert all(torch.equal(straight["weights"][name], halves["weights"][name]) for name in straight["weights"])
    assert all(torch.equal(straight["optimizer"][index][name], halves["optimizer"][index][name])
               for index in straight["optimizer"] for name in ("exp_avg", "exp_avg_sq", "step"))
    assert straight["schedule"] == halves["schedule"]
    assert straight["progress"] == halves["progress"]
    assert straight["schedule"]["last_epoch"] == WHOLE


def _require_equal_logs(directory: Path) -> None:
    kept = ("step", "loss", "lr", "grad_norm", "loss/code", "tokens")

    def values(*paths: Path) -> list[dict[str, Any]]:
        return [{name: line.get(name) for name in kept} for path in paths for line in read_lines(path / "metrics.jsonl")]

    halves = directory / "halves"
    assert values(directory / "straight" / "launch") == values(halves / "launch", halves / "again")
    assert read_lines(directory / "straight" / "launch" / "samples.jsonl") == [
        *read_lines(halves / "launch" / "samples.jsonl"), *read_lines(halves / "again" / "samples.jsonl")]
    assert [line["step"] for line in values(directory / "straight" / "launch")] == list(range(1, WHOLE + 1))


@pytest.mark.parametrize("cell", SINGLE, ids=_name)
def test_restart_of_one_process_changes_no_bit(single: Path, cell: Cell) -> None:
    """Weights, moments, schedule, progress and every logged value are the same with and without a restart."""
    _require_equal_states(single / _name(cell))
    _require_equal_logs(single / _name(cell))


@pytest.mark.parametrize("cell", TWO_RANKS, ids=_name)
def test_restart_of_two_ranks_changes_no_bit(two_ranks: Path, cell: Cell) -> None:
    """The same for DDP and for FSDP2, whose checkpoints are whole."""
    _require_equal_states(two_ranks / _name(cell))
    _require_equal_logs(two_ranks / _name(cell))


@pytest.mark.slow
@pytest.mark.parametrize("cell", MORE, ids=_name)
def test_restart_of_the_other_two_rank_cells_changes_no_bit(more_cells: Path, cell: Cell) -> None:
    """The rest of the matrix."""
    _require_equal_states(more_cells / _name(cell))
    _require_equal_logs(more_cells / _name(cell))


def test_plateau_was_really_reached(single: Path) -> None:
    """The cell's LR was cut on both sides of the restart, or the comparison above would show nothing."""
    lines = read_lines(single / "no-1-plateau" / "straight" / "launch" / "metrics.jsonl")
    lrs = [line["lr"] for line in lines]
    assert lrs[-1] < lrs[HALF] < lrs[2]


@pytest.mark.slow
@pytest.mark.parametrize("cell", ZERO, ids=_name)
def test_restart_under_zero_changes_no_logged_value(tmp_path: Path, cell: Cell) -> None:
    """Losses, LRs, norms and samples after the restart are those of the run that never stopped."""
    pytest.importorskip("deepspeed")
    if not (shutil.which("c++") or shutil.which("g++")):
        pytest.skip("DeepSpeed builds shm_comm on a CPU: no C++ compiler here")
    _require_equal_logs(_train(tmp_path, [cell], 2) / _name(cell))

"""n steps, a restart in fresh processes and n more steps equal 2n steps, bit for bit.

What is compared: every tensor and every value in every file of the last checkpoint (weights, moments, schedule, progress,
random generators), the LR, loss, norm and sample digest of every step; for one process, DDP and ZeRO 1 to 3 on two
ranks, float32 and bf16, with and without accumulation, with the compression ramp and with ACT. A sample of the matrix is
part of every test run, the whole of it is `slow` and prints a table (`pytest -m slow -k whole_matrix -s`). A second table has
the modern recipe and data plans under other loops and trainers (`-k plans_and_the_modern_recipe`; `plan_cells.py`): there the
tensors of weights and optimizers and all losses are compared.
"""

import importlib.util
import json
import os
import subprocess
import sys
import warnings
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from chronicle.data.shard_index import index_source, write_source_index
from tests.bit_transformer.launches import ROOT, job, read_lines, run_jobs
from tests.data.elastic_data import write_foreign_tars

HALF, WHOLE = 4, 8
MOST_PADDING = 2  # of ACT's two halting units, one bias of one element each
TIMES = ("ds_config",)  # holds objects of its own
EXTRA: dict[str, tuple[str, ...]] = {
    "plain": (),
    "ramp": ("compress_end=0.5", "compress_ramp_steps=6", "compress_longer=true"),
    "act": ("act=true", "num_layers=2"),
    "all": ("act=true", "num_layers=2", "compress_end=0.5", "compress_ramp_steps=6", "compress_longer=true",
            "eval_every=2"),
    "reversible": ("norm=pre", "reversible=true", "act=true", "num_layers=2", "chunk=32", "overlap=8"),
    "plateau": ("shape=plateau", "decay_steps=0", "eval_every=1", "plateau_patience=1", "plateau_min_gain=1.0"),
    "growth": ("shape=plateau", "decay_steps=0", "eval_every=1", "plateau_patience=2", "plateau_min_gain=1.0", "norm=pre",
               "growth=('depth', 'width')"),
    "qat": (f"qat_from_step={HALF - 1}",),
    "muon": ("norm=pre", "rotary=true", "qk_norm=true", "muon_lr=0.02"),
}
Cell = tuple[str, str, int, str]  # sharding, precision, accumulation, what else
SINGLE: list[Cell] = [*product(("ddp",), ("no", "bf16"), (1, 4), ("plain",)), ("ddp", "no", 1, "ramp"),
                      ("ddp", "no", 4, "all"), ("ddp", "bf16", 1, "reversible"), ("ddp", "no", 1, "plateau"),
                      ("ddp", "no", 1, "growth"), ("ddp", "bf16", 1, "qat"), ("ddp", "no", 1, "muon")]
TWO_RANKS: list[Cell] = [("ddp", "no", 1, "ramp"), ("ddp", "bf16", 4, "act"), ("ddp", "no", 4, "all"),
                         ("ddp", "no", 1, "act"), ("ddp", "bf16", 4, "ramp")]
ZERO_SAMPLE: list[Cell] = [("zero3", "bf16", 4, "ramp")]
MORE: list[Cell] = [("ddp", "bf16", 1, "reversible"), ("ddp", "no", 1, "growth"), ("ddp", "bf16", 4, "qat")]
ZERO = ("zero1", "zero2", "zero3")
KINDS = ("single", "ddp", *ZERO)
VARIANTS: list[tuple[str, int, str]] = list(product(("no", "bf16"), (1, 4), ("ramp", "act")))
needs_zero = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")


def _name(cell: Cell) -> str:
    return "-".join(map(str, cell))


def _train(root: Path, cells: list[Cell], num_processes: int) -> Path:
    """As below; once more where gloo ended a rank by SIGABRT, as it does now and then without chronicle, too."""
    try:
        return _train_once(root / "first", cells, num_processes)
    except AssertionError as problem:
        if num_processes == 1 or "SIGABRT" not in str(problem):
            raise
        warnings.warn(f"two ranks were ended by SIGABRT, and are trained again: {problem}", stacklevel=2)
    return _train_once(root / "again", cells, num_processes)


def _train_once(root: Path, cells: list[Cell], num_processes: int) -> Path:
    """Train every cell straight and in two halves; the halves in different processes."""
    first, second = [], []
    for cell in cells:
        sharding, precision, accumulation, extra = cell
        settings = (f"sharding={sharding}", f"mixed_precision={precision}", f"accumulation_steps={accumulation}",
                    f"total_steps={WHOLE}", *EXTRA[extra])
        directory = root / _name(cell)
        first += [job(directory / "straight", *settings), job(directory / "halves", *settings, stop_at=HALF)]
        second += [job(directory / "halves", *settings, launch="again")]
    for jobs in (first, second):
        run_jobs(jobs, num_processes=num_processes, timeout_seconds=240 if len(cells) == 1 else 1200)
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


def _equal_states(directory: Path) -> int:
    """How many files of state are equal; asserts that none differs."""
    straight, halves = (directory / side / "checkpoints" / f"opt_step-{WHOLE}" / "accelerator_state"
                        for side in ("straight", "halves"))
    names = sorted(str(path.relative_to(straight)) for path in straight.rglob("*")
                   if path.suffix in (".safetensors", ".bin", ".pt", ".pkl"))
    assert names == sorted(str(path.relative_to(halves)) for path in halves.rglob("*")
                           if path.suffix in (".safetensors", ".bin", ".pt", ".pkl"))
    assert any("model" in name for name in names) and any("optim" in name for name in names) and len(names) >= 4
    for name in names:
        if "zero_pp_rank" not in name:
            _require_equal(_load(straight / name), _load(halves / name), name)
    _require_equal_parts(straight, halves)
    assert _load(halves / "custom_checkpoint_0.pkl")["last_epoch"] == WHOLE
    return len(names)


def _require_equal_parts(straight: Path, halves: Path) -> None:
    """ZeRO's parts: a parameter of odd size leaves the last rank with padding, which DeepSpeed does not initialise; at most
    one element of padding a parameter may differ in ZeRO-3's flat groups, and none of a moment.
    """
    for path in sorted(straight.rglob("zero_pp_rank*")):
        one, other = (_load(side / path.relative_to(straight)) for side in (straight, halves))
        stage3 = [state.get("optimizer_state_dict", {}).pop("fp32_flat_groups", []) for state in (one, other)]
        _require_equal(one, other, path.name)
        for mine, reference in zip(*stage3, strict=True):
            assert int((mine != reference).sum()) <= MOST_PADDING, f"{path.name}: fp32_flat_groups differs"


def _load(path: Path) -> Any:
    return load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=False)


def _require_equal(one: Any, other: Any, where: str) -> None:
    """Bit for bit: tensors and arrays by their bytes, containers by their members, everything else by value."""
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor | np.ndarray):
        assert one.shape == other.shape and one.dtype == other.dtype, where
        assert bool((one == other).all()), f"{where} differs"
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            if key not in TIMES:
                _require_equal(one[key], other[key], f"{where}: {key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for number, (a, b) in enumerate(zip(one, other, strict=True)):
            _require_equal(a, b, f"{where}[{number}]")
    elif isinstance(one, str | int | float | bool | bytes | type(None)):
        assert one == other or one != one, where


def _equal_logs(directory: Path) -> int:
    """How many steps were logged with equal values; asserts that none differs."""
    kept = ("step", "loss", "lr", "grad_norm", "loss/code", "tokens")

    def values(*paths: Path) -> list[dict[str, Any]]:
        return [{name: line.get(name) for name in kept} for path in paths for line in read_lines(path / "metrics.jsonl")]

    halves = directory / "halves"
    assert values(directory / "straight" / "launch") == values(halves / "launch", halves / "again")
    assert read_lines(directory / "straight" / "launch" / "samples.jsonl") == [
        *read_lines(halves / "launch" / "samples.jsonl"), *read_lines(halves / "again" / "samples.jsonl")]
    steps = [line["step"] for line in values(directory / "straight" / "launch")]
    assert steps == list(range(1, WHOLE + 1))
    return len(steps)


@pytest.mark.parametrize("cell", SINGLE, ids=_name)
def test_restart_of_one_process_changes_no_bit(single: Path, cell: Cell) -> None:
    """Weights, moments, schedule, progress and every logged value are the same with and without a restart."""
    assert _equal_states(single / _name(cell)) >= 4
    assert _equal_logs(single / _name(cell)) == WHOLE


@pytest.mark.parametrize("cell", TWO_RANKS, ids=_name)
def test_restart_of_two_ranks_changes_no_bit(two_ranks: Path, cell: Cell) -> None:
    """The same for DDP."""
    assert _equal_states(two_ranks / _name(cell)) >= 4
    assert _equal_logs(two_ranks / _name(cell)) == WHOLE


@pytest.mark.slow
@pytest.mark.parametrize("cell", MORE, ids=_name)
def test_restart_of_the_other_two_rank_cells_changes_no_bit(more_cells: Path, cell: Cell) -> None:
    """The rest of the matrix."""
    assert _equal_states(more_cells / _name(cell)) >= 4
    assert _equal_logs(more_cells / _name(cell)) == WHOLE


def test_plateau_was_really_reached(single: Path) -> None:
    """The cell's LR was cut on both sides of the restart, or the comparison above would show nothing."""
    lines = read_lines(single / "ddp-no-1-plateau" / "straight" / "launch" / "metrics.jsonl")
    lrs = [line["lr"] for line in lines]
    assert lrs[-1] < lrs[HALF] < lrs[2]


def test_growth_really_happened(single: Path) -> None:
    """One growth on each side of the restart, each with its lowered LR and its journal entry."""
    directory = single / _name(("ddp", "no", 1, "growth"))
    state = torch.load(directory / f"halves/checkpoints/opt_step-{WHOLE}/accelerator_state/custom_checkpoint_1.pkl")
    assert [kind for _, kind in state["growths"]] == ["depth", "width"]
    assert state["growths"][0][0] < HALF < state["growths"][1][0]


@needs_zero
@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.timeout(600)
@pytest.mark.parametrize("cell", ZERO_SAMPLE, ids=_name)
def test_restart_under_zero_changes_no_bit(tmp_path: Path, cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of every rank are those of the run that never stopped; nothing is built, and no killed build is waited for."""
    lock = tmp_path / "extensions/deepspeed_shm_comm/lock"
    lock.parent.mkdir(parents=True)
    lock.touch()  # what a killed build leaves: torch would wait for its end
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    trained = _train(tmp_path, [cell], 2)
    assert [path for path in (tmp_path / "extensions").rglob("*") if path.is_file()] == [lock]
    assert _equal_states(trained / _name(cell)) >= 4
    assert _equal_logs(trained / _name(cell)) == WHOLE


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=needs_zero if kind in ZERO else ()) for kind in KINDS])
def test_whole_matrix_changes_no_bit(tmp_path: Path, kind: str) -> None:
    """{single, DDP, ZeRO 1, 2, 3} × {float32, bf16} × {1, 4 micro-batches} × {ramp, ACT}: 40 cells, a table of eight."""
    cells = [("ddp" if kind == "single" else kind, *variant) for variant in VARIANTS]
    trained = _train(tmp_path, cells, 1 if kind == "single" else 2)
    table = {f"{kind:<7} {cell[1]:<5} accumulation {cell[2]}  {cell[3]:<5}": _verdict(trained / _name(cell)) for cell in cells}
    print("\n" + "\n".join(f"{name} {verdict}" for name, verdict in table.items()))
    assert set(table.values()) == {"bit-identical"}, table


def _verdict(directory: Path) -> str:
    try:
        _equal_states(directory)
        _equal_logs(directory)
    except AssertionError as problem:
        return f"differs: {str(problem).splitlines()[0]}"
    return "bit-identical"


# --- The second table: 16 cells each of a loop of one's own, Accelerate, the HF Trainer and Lightning; 16 of the modern recipe

PLANS = ("torch", "accelerate", "trainer", "lightning")
MODERN = {"modern": (1, ["single"], ("plain", "compile")), "modern-two-ranks": (2, ["ddp", "fsdp2"], ("plain",))}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", [*PLANS, *MODERN])
def test_plans_and_the_modern_recipe_change_no_bit(tmp_path: Path, kind: str) -> None:
    """{0, 2 workers} × {1, 3 parts} × {saved in a pass, at its end}; {float32, bf16} × {1, 4 parts} ×
    {one process, compiled; DDP, FSDP2 on two ranks}.
    """
    write_foreign_tars(tmp_path, shards=2, samples=40)
    for name in ("web", "code"):
        write_source_index(index_source(name, tmp_path / name), tmp_path / f"{name}.index")
    world, shardings, forms = MODERN.get(kind, (1, [], ()))
    cells = ["-".join(("modern", *cell)) for cell in product(shardings, ("no", "bf16"), "14", forms)] or [
        "-".join(cell) for cell in product([kind], "02", "13", ("mid", "end"))]
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world)] if world > 1 else []
    environ = {name: value for name, value in os.environ.items() if not name.startswith("CHRONICLE_")}
    for phase in ("first", "rest"):
        words = [sys.executable, *start, str(Path(__file__).with_name("plan_cells.py")), str(tmp_path), phase, *cells]
        done = subprocess.run(words, env={**environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, capture_output=True,
                              text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
    table = {}
    for cell, rank in product(cells, range(world)):
        whole, rest = (json.loads((tmp_path / cell / f"{side}-{rank}.json").read_text()) for side in ("whole", "rest"))
        count = len(rest["losses"])
        same = whole["digest"] == rest["digest"] and whole["losses"][-count:] == rest["losses"] and count < len(whole["losses"])
        table[f"{cell} rank {rank}"] = "bit-identical" if same else "differs"
    print("\n" + "\n".join(f"{name:<40} {verdict}" for name, verdict in table.items()))
    assert set(table.values()) == {"bit-identical"}, table

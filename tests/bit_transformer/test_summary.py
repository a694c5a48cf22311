"""The end of a run says what the model is worth beside its yardsticks, also where its weights are cut up."""

import re
from pathlib import Path

import pytest

from tests.bit_transformer.launches import job, run_jobs
from tests.bit_transformer.test_exact_resume import needs_zero

ROWS = ("coin flip", "unigram", "order 3", "xz", "zstd")


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [pytest.param(("zero2", "zero3"), marks=needs_zero)], ids=lambda kinds: kinds[-1])
def test_sharded_model_ends_with_the_table(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    """The table's first row is the last held-out evaluation; once, from the main rank."""
    done = run_jobs([job(tmp_path / kind, f"sharding={kind}", "total_steps=8", "summary=true",
                         "eval_windows=32", "mixed_precision=bf16") for kind in kinds], num_processes=2)
    for part in done.stdout.split("start of demo")[1:]:
        held_out = re.search(r"held-out at step 8: code ([\d.]+), reference ([\d.]+)", part)
        model = re.search(r"^model +([\d.]+) +([\d.]+)$", part, re.MULTILINE)
        assert held_out and model, part
        assert [float(value) for value in model.groups()] == pytest.approx([float(value) for value in held_out.groups()],
                                                                            abs=0.01)
        assert all(len(re.findall(rf"^{row} +[\d.]+ +[\d.]+$", part, re.MULTILINE)) == 1 for row in ROWS)
    assert done.stdout.count("finished after step 8") == len(kinds)

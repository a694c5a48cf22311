"""A few hundred steps on two corpora: the model learns more than letter frequencies, and the LR is the planned one."""

from pathlib import Path

import pytest

from bit_transformer.data.loaders import open_held_out, read_corpus
from bit_transformer.evaluation.held_out import order_bpb
from bit_transformer.recipes import find_recipe, with_settings
from bit_transformer.training.schedule import plan_schedule
from tests.bit_transformer.launches import ROOT, read_lines, run_jobs

SETTINGS = ("norm=pre", "rotary=true", "qk_norm=true", "muon_lr=0.02",
            "window_bytes=12", "max_bits=108", "batch_size=32", "optimizer.lr=0.006", "total_steps=400",
            "warmup_steps=20", "decay_steps=133", "raise_step=none", "raise_factor=1.0", "eval_windows=256",
            "eval_every=400", "checkpoint_every=1000", "summary=false")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_model_learns_and_the_schedule_does_not_drift(tmp_path: Path) -> None:
    """Held-out bits per byte below the unigram's on the same bytes, in both sources; every step's LR is the schedule's."""
    assert ROOT.is_dir()
    run_jobs([{"directory": str(tmp_path), "settings": list(SETTINGS), "resume": "auto", "stop_at": None, "nan": None,
               "launch": "launch", "environ": {}}])
    recipe = with_settings(find_recipe("demo"), SETTINGS)
    lines = read_lines(tmp_path / "launch/metrics.jsonl")
    held_out = open_held_out(recipe.data.sources, 12, 256, data_dir=None)
    for source, windows in held_out.items():
        assert lines[-1][f"eval_bpb/{source}"] < order_bpb(read_corpus(source).train, windows.numpy().tobytes(), 0)
    factor = plan_schedule(recipe.schedule)
    assert [line["step"] for line in lines] == list(range(1, 401))
    assert all(line["lr"] == recipe.optimizer.lr * factor(line["step"] - 1) for line in lines)

"""The end of a run says what the model is worth beside its yardsticks and lets it write, also where its weights are cut up."""

import re
from pathlib import Path

import pytest

from bit_transformer.recipes import find_recipe
from bit_transformer.training import report
from tests.bit_transformer.launches import job, run_jobs
from tests.bit_transformer.test_exact_resume import needs_zero

ROWS = ("coin flip", "unigram", "order 3", "xz", "zstd")


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [("fsdp2",), pytest.param(("zero2", "zero3"), marks=needs_zero)], ids=lambda kinds: kinds[-1])
def test_sharded_model_ends_with_the_table_and_samples(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    """The table's first row is the last held-out evaluation; four texts follow; once, from the main rank."""
    done = run_jobs([job(tmp_path / kind, f"sharding={kind}", "total_steps=8", "summary=true", "telemetry_windows=1",
                         "eval_windows=32", "mixed_precision=bf16") for kind in kinds], num_processes=2)
    for part in done.stdout.split("start {")[1:]:
        held_out = re.search(r"held-out at step 8: code ([\d.]+), reference ([\d.]+)", part)
        model = re.search(r"^model +([\d.]+) +([\d.]+)$", part, re.MULTILINE)
        assert held_out and model, part
        assert [float(value) for value in model.groups()] == pytest.approx([float(value) for value in held_out.groups()],
                                                                            abs=0.01)
        assert all(len(re.findall(rf"^{row} +[\d.]+ +[\d.]+$", part, re.MULTILINE)) == 1 for row in ROWS)
        assert part.count("sample: ") == 4 and part.count("samples: drawing 4 texts of 64 bytes") == 1
    assert done.stdout.count("finished after step 8") == len(kinds)


def test_samples_say_every_ten_seconds_how_far_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """A clock of the test: nothing for nine seconds, one line after ten, the next one ten later."""
    times = iter([0.0, 9.0, 10.0, 10.0, 19.0, 20.0, 20.0])
    log = report.LaunchLog({}, is_main=True, recipe=find_recipe("demo"))
    after_byte = log._tell_of_bytes(clock=lambda: next(times))
    for done in (1, 2, 3, 4):
        after_byte(done)
    assert capsys.readouterr().out.splitlines() == ["samples: 2 of 64 bytes", "samples: 4 of 64 bytes"]

"""Another number of ranks after a restart is refused by the guard; let pass, the samples are the same in the same order."""

from pathlib import Path

import pytest

from tests.bit_transformer.launches import job, read_lines, run_jobs

pytestmark = [pytest.mark.slow, pytest.mark.sample]
SETTINGS = ("total_steps=8", "checkpoint_every=4")


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Four steps on two ranks and four on one, beside eight on one, and what was said of what is refused."""
    root = tmp_path_factory.mktemp("world")
    two = run_jobs([*(job(root / name, *SETTINGS, stop_at=4) for name in ("halves", "refused")),
                    job(root / "odd", *SETTINGS, "batch_size=9")], num_processes=2, check=False)
    assert (root / "refused/checkpoints/opt_step-4/chronicle-manifest.json").is_file(), two.stderr[-3000:]
    run_jobs([job(root / "straight", *SETTINGS), job(root / "halves", *SETTINGS, launch="again",
                                                     environ={"CHRONICLE_ACCEPT_CHANGE": "one machine is gone"})])
    one = run_jobs([job(root / "refused", *SETTINGS, launch="again")], check=False)
    assert one.returncode == 78
    return root, two.stderr + one.stderr


def test_another_number_of_ranks_is_refused_unless_let_pass(moved: tuple[Path, str]) -> None:
    """What was 2 and is 1, with code 78, before a step is made; a reason (`--accept-change`) lets it pass."""
    root, stderr = moved
    said, refusal = stderr.partition("is not as it was saved: `world size`")[1:]
    assert said, stderr[-3000:]
    assert read_lines(root / "refused/again/metrics.jsonl") == [] and "Traceback" not in refusal


def test_fewer_ranks_read_the_same_samples_in_the_same_order(moved: tuple[Path, str]) -> None:
    """Digests of the global batches and LRs are those of one rank throughout; the losses differ by rounding alone."""
    root, _ = moved
    for name, keys in (("samples.jsonl", ("step", "digest")), ("metrics.jsonl", ("step", "lr", "tokens"))):
        halves = read_lines(root / "halves/launch" / name) + read_lines(root / "halves/again" / name)
        straight = read_lines(root / "straight/launch" / name)
        assert [[line[key] for key in keys] for line in halves] == [[line[key] for key in keys] for line in straight]
    losses = [line["loss"] for part in ("launch", "again") for line in read_lines(root / "halves" / part / "metrics.jsonl")]
    assert losses == pytest.approx([line["loss"] for line in read_lines(root / "straight/launch/metrics.jsonl")], rel=1e-4)


def test_batch_that_does_not_divide_is_refused_by_every_rank(moved: tuple[Path, str]) -> None:
    """One sentence with both numbers, no traceback, no checkpoint."""
    root, stderr = moved
    assert stderr.count("error: data.batch_size 9 does not divide among 2 ranks × 1 accumulation steps") == 2
    assert "BadRecipe" not in stderr and not (root / "odd/checkpoints").exists()

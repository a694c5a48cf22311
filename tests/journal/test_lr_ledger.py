"""The LR ledger: the factors of the seed, and what an undo, a crash before the first save, and a wrong LR do to them."""

from itertools import groupby
from pathlib import Path

from chronicle.journal import compute_lineage, read_journal
from chronicle.journal.lr_ledger import LrLedger, compute_lr_ledger
from tests.builders.story_runs import StoryRun, toy_run


def ledger(story: StoryRun) -> LrLedger:
    entries = read_journal(story.paths).entries
    return compute_lr_ledger(entries, compute_lineage(entries))


def launch(story: StoryRun, number: int, start: int, last: int) -> None:
    story.start(number, start)
    story.end(number, last)


def factors(told: LrLedger) -> list[float | None]:
    """In launch order, a repeated one once."""
    return [factor for factor, _ in groupby(line.factor for line in told.lines)]


def test_the_toy_run_trains_at_half_after_its_rollback(tmp_path: Path) -> None:
    assert factors(ledger(toy_run(tmp_path))) == [1.0, 0.5]


def wrong_lr(run: StoryRun, launch: int, step: int) -> None:
    """What the detector writes where the LR is not the promised one."""
    data = {"kind": "lr-mismatch", "tier": "propose", "onset_step": step}
    run.add("incident", launch=launch, step=step, title="LR restarted from zero", data=data)


def test_the_seed_80b_run_ends_at_0_1875_and_says_where_the_lr_was_wrong(tmp_path: Path) -> None:
    """1 → .75 → .375 → (bug) → .375 → .1875; the authors wrote "25 % from the original" for the last one."""
    run = StoryRun(tmp_path)
    launch(run, 1, 0, 15900)
    run.rollback(15611)
    launch(run, 2, 15611, 15750)
    run.rollback(14500, 0.75)
    launch(run, 3, 14500, 16500)
    run.rollback(16250)
    launch(run, 4, 16250, 16420)
    run.rollback(16250, 0.5)
    launch(run, 5, 16250, 29300)
    run.rollback(29000, 2.0)  # exp8: "going back to the original LR" is ×0.75 …
    launch(run, 6, 29000, 30600)  # … and Accelerate loaded no state at all: the LR starts at zero
    wrong_lr(run, 6, 29001)
    run.rollback(30250, base_lr_after=None)
    launch(run, 7, 30250, 30900)
    wrong_lr(run, 7, 30251)
    run.rollback(30500, base_lr_before=5e-5, base_lr_after=1.875e-5, parent_launch=6)
    launch(run, 8, 30500, 35500)
    run.rollback(34000, 0.5)
    launch(run, 9, 34000, 39036)
    found = ledger(run)
    by_launch = {line.launch: line.factor for line in found.lines}
    assert by_launch[3] == 0.75 and by_launch[5] == 0.375
    assert by_launch[6] is None and by_launch[7] is None
    assert found.line(6).asked == 0.75  # type: ignore[union-attr]
    assert by_launch[8] is None  # without a known first base LR an absolute one says nothing


def test_a_stated_base_lr_repairs_the_ledger_after_a_bug(tmp_path: Path) -> None:
    run = StoryRun(tmp_path)
    run.start(1, 0, base_lr=5e-5)
    run.end(1, 100)
    run.rollback(80, 0.375)
    launch(run, 2, 80, 120)
    wrong_lr(run, 2, 81)
    run.rollback(110, base_lr_after=1.875e-5)
    launch(run, 3, 110, 140)
    run.rollback(130, 0.5)
    launch(run, 4, 130, 150)
    assert factors(ledger(run)) == [1.0, None, 0.375, 0.1875]


def test_a_crash_before_the_first_save_restarts_from_the_edited_checkpoint(tmp_path: Path) -> None:
    """Launch 2 dies at 8 without a checkpoint; launch 3 starts at 5 again and must not fall back to ×1."""
    run = toy_run(tmp_path)
    launch(run, 3, 5, 9)
    assert [line.factor for line in ledger(run).lines] == [1.0, 0.5, 0.5]


def test_a_refused_launch_does_not_use_up_the_factor(tmp_path: Path) -> None:
    run = StoryRun(tmp_path)
    launch(run, 1, 0, 10)
    run.rollback(5, 0.5)
    run.start(2, None)
    run.end(2, None, exit_code=78)
    launch(run, 3, 5, 8)
    assert ledger(run).line(3).factor == 0.5  # type: ignore[union-attr]


def test_undo_gives_the_factor_back(tmp_path: Path) -> None:
    run = StoryRun(tmp_path)
    launch(run, 1, 0, 10)
    receipt = run.rollback(5, 0.5)
    assert ledger(run).pending == 0.5
    run.add("undo.receipt", refs=(receipt.id,))
    assert ledger(run).pending is None
    launch(run, 2, 10, 12)
    assert ledger(run).line(2).factor == 1.0  # type: ignore[union-attr]


def test_the_factor_is_taken_from_the_launch_that_owns_the_target_step(tmp_path: Path) -> None:
    """Back to before an earlier rollback: its factor goes with it."""
    run = StoryRun(tmp_path)
    launch(run, 1, 0, 100)
    run.rollback(80, 0.5)
    launch(run, 2, 80, 120)
    run.rollback(60, 0.1)
    launch(run, 3, 60, 70)
    assert ledger(run).line(3).factor == 0.1  # type: ignore[union-attr]


def test_a_guard_that_found_another_lr_breaks_the_line(tmp_path: Path) -> None:
    run = StoryRun(tmp_path)
    launch(run, 1, 0, 10)
    run.start(2, 10)
    checks = [{"name": "lr.group0", "expected": 5e-5, "found": 0.0}, {"name": "step", "expected": 10, "found": 10}]
    run.add("guard.verdict", launch=2, step=10, data={"verdict": "warned", "checks": checks})
    run.end(2, 20)
    assert ledger(run).line(2).factor is None  # type: ignore[union-attr]


def test_fields_set_by_hand_leave_the_factor_unknown_unless_a_base_lr_is_stated(tmp_path: Path) -> None:
    run = StoryRun(tmp_path)
    launch(run, 1, 0, 10)
    run.add("rollback.receipt", step=5, data={"lr_ratio": None, "sets": {"_last_lr": 1e-5}})
    assert ledger(run).pending is None
    run.add("rollback.receipt", step=5, data={"lr_ratio": 0.5, "base_lr_before": 4e-5, "base_lr_after": 2e-5})
    assert ledger(run).pending is None  # half of an unknown LR; before is no anchor either
    launch(run, 2, 5, 8)
    assert ledger(run).line(2).factor is None  # type: ignore[union-attr]


def test_the_guards_own_words_for_a_wrong_lr_break_the_line(tmp_path: Path) -> None:
    run = StoryRun(tmp_path)
    launch(run, 1, 0, 10)
    run.start(2, 10)
    checks = [{"name": "learning rate per group", "ok": False, "expected": "5e-05", "found": "0"}]
    run.add("guard.verdict", launch=2, step=10, data={"verdict": "warned", "checks": checks})
    run.end(2, 20)
    assert ledger(run).line(2).factor is None  # type: ignore[union-attr]


def test_a_wrong_lr_at_the_resume_breaks_the_line_and_a_jump_later_on_does_not(tmp_path: Path) -> None:
    """exp8 and exp9 were wrong from the first step; an LR that the schedule itself raises still follows the ledger."""
    for onset, factor in ((101, None), (300, 1.0)):
        story = StoryRun(tmp_path / str(onset))
        launch(story, 1, 0, 100)
        story.start(2, 100)
        event = {"kind": "lr-mismatch", "onset_step": onset, "id": 0}
        story.add("incident", launch=2, step=onset, title="lr-mismatch", data=event)
        story.end(2, 400)
        assert [line.factor for line in ledger(story).lines] == [1.0, factor]

"""Which step a save is of, how the answer to a signal is told, and what is said of the last rehearsal."""

import pickle
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from chronicle.cli.rehearse import said_of
from chronicle.journal import JournalWriter, read_journal
from chronicle.journal.events import GuardVerdict, LaunchStart, Rehearsed
from chronicle.launch.code import read_code
from chronicle.metrics.log import Point
from chronicle.paths import RunPaths
from chronicle.rehearse.judge import Rank
from chronicle.rehearse.launches import Place, Played, _Seen
from chronicle.rehearse.rehearse import Rehearsal, _target, answer_to_signal, begun, due_after
from rollback.checkpoint.below import checkpoints_below, saved_in
from rollback.checkpoint.layout import Checkpoint


def save(path: Path, step: int, optimizer_steps: int) -> None:
    groups = [{"lr": 0.1, "params": [0]}]
    state = {"optimizer": {"state": {0: {"step": optimizer_steps}}, "param_groups": groups}, "train_state": {"step": step}}
    path.write_bytes(pickle.dumps(state))


def test_a_save_is_of_the_step_in_its_name_though_its_optimizer_began_anew(tmp_path: Path) -> None:
    """Moments that are not loaded count 20 steps in the save of step 30: it was compared with the save of step 20."""
    for step, counted in ((10, 10), (20, 10), (30, 20)):
        save(tmp_path / f"ckpt_{step}.pt", step, counted)
    assert {step: one.path.name for step, one in saved_in(tmp_path).items()} == {
        10: "ckpt_10.pt", 20: "ckpt_20.pt", 30: "ckpt_30.pt",
    }  # fmt: skip


def test_batches_are_the_steps_where_an_optimizer_steps_once_in_several(tmp_path: Path) -> None:
    for step in (10, 20):
        save(tmp_path / f"ckpt_{step}.pt", step, step // 4)
    assert set(saved_in(tmp_path)) == {10, 20}


def test_files_of_a_directory_named_by_their_step_are_one_save(tmp_path: Path) -> None:
    """What is resumed from is the directory, and all of its files are compared; two files beside each other are two saves."""
    (tmp_path / "step-10").mkdir()
    (tmp_path / "saves").mkdir()
    for folder in ("step-10", "saves"):
        save(tmp_path / folder / "model.pt", 10, 10)
        save(tmp_path / folder / "trainer.pt", 10, 10)
    listed = sorted(str(one.path.relative_to(tmp_path)) for one in checkpoints_below(tmp_path))
    assert listed == ["saves/model.pt", "saves/trainer.pt", "step-10"]


def test_a_number_in_a_name_that_the_file_does_not_count_is_no_step(tmp_path: Path) -> None:
    save(tmp_path / "resnet50.pt", 10, 10)
    assert set(saved_in(tmp_path)) == {10}


OPEN_CLIP = "2026-11-29,09:34:59 | INFO | Train Epoch: {} [32/32 (100%)] Data (t): 0.6 LR: 0.00025 Loss: 3.4657 (3.4657)\n"


@pytest.mark.parametrize(("line", "step"), [(OPEN_CLIP, 0), ("step {} loss 3.4\n", 2)])
def test_numbers_beyond_the_last_step_are_samples_and_saves_alone_tell(tmp_path: Path, line: str, step: int) -> None:
    """OpenCLIP prints 32 samples in its first epoch: a launch to epoch 4 was ended before it had saved once."""
    place = Place(name="a", scratch=tmp_path)
    place.prepare()
    seen = _Seen(place, last_step=4)
    seen.output.write_text(line.format(0) + line.format(1) + line.format(2))
    assert (seen.step(), seen.is_counting_steps) == (step, step > 0)
    save(place.out / "epoch_3.pt", 3, 3)
    for _ in range(5):
        seen.newest_save()
    assert seen.step() == (step or 3)


def test_a_directory_without_a_file_is_no_save_yet(tmp_path: Path) -> None:
    """LitGPT makes `step-00000010` and serialises in memory first: it was killed there, and had nothing to resume from."""
    (tmp_path / "step-00000010").mkdir()
    assert saved_in(tmp_path) == {}
    (tmp_path / "step-00000010" / "lit_model.bin").write_bytes(b"x")
    assert set(saved_in(tmp_path)) == {10}


@pytest.mark.parametrize("kind", ["link", "text", ""])
def test_a_resume_goes_on_from_what_a_pointer_names(tmp_path: Path, kind: str) -> None:
    """The first save was taken and the newest moved away: `latest` led nowhere, and an exact script began anew."""
    asked = Rehearsal(command=("x",), at=10, to=20, signal="SIGKILL")
    place = Place(name="b", scratch=tmp_path)
    place.prepare()
    for step in (8, 10, 12):
        save(place.out / f"ckpt_{step}.pt", step, step)
    if kind == "link":
        (place.out / "latest").symlink_to("ckpt_12.pt")
    if kind == "text":
        (place.out / "latest").write_text("checkpoints/ckpt_12.pt\n")
    ended = replace(played((), 15), listed=tuple(checkpoints_below(place.out)))
    target, rows = _target(asked, place, ended)
    assert target is not None
    assert (target.step, len(rows)) == ((12, 0) if kind else (10, 1))
    assert (place.out / "ckpt_12.pt").exists() is bool(kind)


def test_a_pointer_to_the_last_step_leaves_nothing_to_compare(tmp_path: Path) -> None:
    asked = Rehearsal(command=("x",), at=10, to=20, signal="SIGKILL")
    place = Place(name="b", scratch=tmp_path)
    place.prepare()
    for step in (10, 20):
        save(place.out / f"ckpt_{step}.pt", step, step)
    (place.out / "latest").write_text("ckpt_20.pt")
    target, (row,) = _target(asked, place, replace(played((), 20), listed=tuple(checkpoints_below(place.out))))
    assert target is None and row.rank is Rank.NOT_COMPARED and "`latest` named that of step 20" in row.text


def played(saves: tuple[int, ...], last: int) -> Played:
    """A launch that was told after step 10, when the save of step 7 was there."""
    listed = tuple(
        Checkpoint(path=Path(f"{step}.pt"), step=step, step_source="name", format="x", files=()) for step in saves
    )
    return Played(
        out=Path(), listed=listed, points=(Point(last, last, 0.0, {"loss": 1.0}),), prints={}, start=LaunchStart(), guard=(),
        end="", exit_code=143, ended_in=3.1, saved_before=frozenset({7}), told_at=10,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("saves", "last", "rank", "said"),
    [
        ((7, 12), 12, Rank.NOTE, "saved at step 12 within 3.1 s"),
        ((7,), 12, Rank.SIGNAL, "nothing saved, 5 steps lost; it ended with code 143 in 3.1 s"),
        (
            (7, 14),
            20,
            Rank.NOT_COMPARED,
            "it came after step 10, and the last step, 20, was 3.1 s later: name a later --to",
        ),
        ((7, 11, 14), 20, Rank.NOTE, "it came after step 10: saved at step 11, and went on to step 20"),
    ],
)
def test_a_save_that_comes_anyway_is_no_answer_to_a_signal(saves: tuple[int, ...], last: int, rank: Rank, said: str) -> None:
    asked = Rehearsal(command=("x",), at=10, to=20, signal="SIGTERM")
    row = answer_to_signal(asked, played(saves, last))
    assert (row.rank, row.sentence) == (rank, f"TERM: {said}")
    if rank is Rank.NOT_COMPARED:  # the HF Trainer waits 3 s before it saves
        late = answer_to_signal(asked, replace(played(saves, last), ended_in=8.0))
        assert late.sentence == "TERM: it came after step 10, and was not heard: the launch went on to step 20"
        ending = answer_to_signal(asked, replace(played(saves, last), ended_in=8.0, stepped_for=2.0))  # and six seconds to end
        assert ending.rank is Rank.NOT_COMPARED and "the last step, 20, was 2.0 s later" in ending.text
    if last == 12 and rank is Rank.NOTE:
        failed = answer_to_signal(asked, replace(played(saves, last), own_code=1))
        assert failed.sentence == f"TERM: {said}, and then it failed with code 1"
    unsent = answer_to_signal(asked, replace(played(saves, last), ended_in=None))
    assert unsent.rank is Rank.NOT_COMPARED and "it was not sent" in unsent.text


def test_a_save_that_was_due_right_after_the_signal_tells_nothing() -> None:
    """Without an undisturbed launch the distance of the saves before tells which were due."""
    asked = Rehearsal(command=("x",), at=10, to=20, signal="SIGTERM")
    assert due_after({5, 10}, 30) >= {15, 20} and 12 not in due_after({5, 10}, 30) and not due_after((), 30)
    row = answer_to_signal(asked, replace(played((7, 14), 20), told_at=13), due_after({7}, 40))
    assert (row.rank, row.sentence) == (Rank.NOT_COMPARED, "TERM: the save of step 14 was due anyway; name another --at")
    row = answer_to_signal(asked, replace(played((7, 13), 13), told_at=13), due_after({7}, 40))
    assert row.rank is Rank.NOTE


def test_what_the_guard_found_at_the_resume_is_told(tmp_path: Path) -> None:
    """A patience that is in no file and moves no number: only the guard sees that it began anew."""
    checks = ({"name": "own object", "ok": False, "expected": "patience 4", "found": "patience 0"}, {"name": "LR", "ok": True})
    resumed = replace(played((), 12), guard=(GuardVerdict(verdict="warned", checks=checks),))
    (row,) = begun(resumed, 10, 12)
    assert (row.rank, row.text) == (Rank.STATE, "own object: patience 4 → patience 0")
    (row,) = begun(replace(resumed, guard=(GuardVerdict(verdict="passed", checks=()),)), 10, 12)
    assert (row.rank, row.sentence) == (Rank.NOTE, "the guard at the resume: passed")


def test_the_last_rehearsal_is_said_with_what_is_known_of_its_code(tmp_path: Path) -> None:
    def said() -> str:
        return said_of(("python", "train.py"), read_journal(paths).entries if paths.journal_dir.is_dir() else [], tmp_path, 2e9)

    paths = RunPaths(tmp_path / "logs" / "r")
    assert said().startswith("never rehearsed")
    found = {"verdict": "resumes exactly", "command": ("python", "train.py"), "signal": "SIGKILL", "at": 10}
    with JournalWriter(paths) as writer:
        writer.write(Rehearsed(**found), title="x")
        assert "ago (no commit says with which code): resumes exactly (SIGKILL at step 10)" in said()
        (tmp_path / "train.py").write_text("pass")
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        for words in (("init", "-q"), ("add", "train.py"), (*identity, "commit", "-qm", "x")):
            subprocess.run(("git", *words), cwd=tmp_path, check=True)
        code = read_code(tmp_path, with_patch=False)
        writer.write(Rehearsed(**found, git_commit=code.commit, git_dirty_digest=code.digest), title="x")
        assert "ago with this code" in said()
        (tmp_path / "train.py").write_text("other")
        assert "ago with other code" in said()

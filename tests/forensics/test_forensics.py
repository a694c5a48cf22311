"""A directory without a journal: launches by the steps of its logs, the lines that tell something, what was not read."""

import json
import os

import pytest

from chronicle.audit.forensics import scan_directory, write_draft
from chronicle.cli.main import run as chronicle
from chronicle.journal import JournalWriter
from chronicle.paths import RunPaths


def steps(first, last, *, clock="16:00", lr=3e-4, loss=2.0):
    return [f"2025-11-24 {clock}:{step % 60:02d} INFO step {step} | loss {loss} | lr {lr}" for step in range(first, last, 10)]


def test_two_launches_in_one_log_are_two_with_pause_and_repeated_steps(tmp_path):
    """A crash, a pause, and the last steps again with another LR: one log, two launches."""
    lines = steps(10, 820)
    lines += ["Traceback (most recent call last):", "RuntimeError: NCCL communicator was aborted on rank 3."]
    lines += ["2025-11-24 16:41:00 INFO launching 8 ranks, batch=64", "2025-11-24 16:41:00 INFO resumed from ckpt/step_800"]
    lines += steps(810, 900, clock="16:42", lr=1.5e-4)
    (tmp_path / "train.log").write_text("\n".join(lines) + "\n")
    scan = scan_directory(tmp_path)
    assert [(one.first_step, one.last_step, one.lr) for one in scan.launches] == [(10, 810, 3e-4), (810, 890, 1.5e-4)]
    draft = write_draft(scan, [])
    assert "1 steps again from step 810, 42 minutes without a step" in draft
    assert [one.text for one in scan.events] == [
        "Traceback (most recent call last):", "RuntimeError: NCCL communicator was aborted on rank 3.",
        "INFO launching 8 ranks, batch=64", "INFO resumed from ckpt/step_800",
    ]  # fmt: skip


def test_a_silent_restart_is_another_launch_and_a_rank_that_lags_is_none(tmp_path):
    (tmp_path / "a.log").write_text("".join(f"step {step} loss 2.0\n" for step in (10, 20, 30, 11, 12)))
    (tmp_path / "b.log").write_text("".join(f"step {step} loss 2.0\n" for step in (10, 20, 10, 30, 20, 40)))
    found = [(one.log, one.first_step, one.last_step) for one in scan_directory(tmp_path).launches]
    assert found == [("a.log", 10, 30), ("a.log", 11, 12), ("b.log", 10, 40)]


def test_a_loss_that_is_not_finite_is_told_with_its_first_step(tmp_path):
    (tmp_path / "a.log").write_text("step 1 loss 2.0\nstep 2 loss 1.5\nstep 3 loss nan\nstep 4 loss nan\n")
    (launch,) = scan_directory(tmp_path).launches
    assert (launch.loss, launch.not_finite_at) == (1.5, 3)
    assert "loss not finite from step 3" in write_draft(scan_directory(tmp_path), [])


def test_what_a_person_wrote_is_no_event(tmp_path):
    """Seed 000 concluded from a post-mortem; a document's sentences are no events, whatever they claim."""
    said = "- We plan to restart at step 2000 with 16 GPUs.\n- On Tuesday Kim killed launch 4: out of memory error.\n"
    for name in ("POSTMORTEM.md", "notes.txt"):
        (tmp_path / name).write_text(said)
    scan = scan_directory(tmp_path)
    assert (scan.launches, scan.events) == ([], [])
    assert "whether a step was taken is not known" in write_draft(scan, [])


def test_the_lines_of_the_night_are_told_with_their_times(tmp_path):
    """Seed 001: a target, a model that was created, a loop that began; no step, so no launch by steps."""
    log = "2025-08-24 07:14:00,709 [INFO] Target: 1,208,606,722 parameters\n"
    log += "2025-08-24 07:15:57,042 [INFO] Starting training loop...\n"
    (tmp_path / "night.log").write_text(log)
    scan = scan_directory(tmp_path)
    assert [f"{one.time:%H:%M:%S}" for one in scan.events] == ["07:14:00", "07:15:57"]
    assert scan.launches == []


def test_binary_rubbish_links_and_one_endless_line_do_no_harm(tmp_path):
    (tmp_path / "x.log").write_bytes(os.urandom(20000))
    (tmp_path / "y.log").write_text("step " * 100_000 + "loss")
    os.symlink("/", tmp_path / "root.log")
    assert [file.path for file in scan_directory(tmp_path).files] == ["x.log", "y.log"]


def test_a_storm_of_errors_is_counted(tmp_path):
    (tmp_path / "x.log").write_text("step 1 loss 2.0\n" + "ValueError: again\n" * 1000)
    scan = scan_directory(tmp_path)
    assert len(scan.events) == 200
    assert scan.left_out == ["`x.log`: 1,000 lines tell something; the first 200 are told"]


def test_a_run_with_a_journal_is_told_from_its_journal(tmp_path, capsys):
    paths = RunPaths(tmp_path / "logs" / "demo")
    with JournalWriter(paths) as writer:
        writer.append("launch.start", launch=1, data={"host": "h"})
        writer.append("launch.end", launch=1, data={"exit_code": 1, "cause": "crash"})
    paths.rank_log(1, 0).parent.mkdir(parents=True, exist_ok=True)
    paths.rank_log(1, 0).write_text("step 1 loss 2.0\n")
    (tmp_path / "old.log").write_text("step 1 loss 2.0\n")
    out = tmp_path / "draft.md"
    assert chronicle(["forensics", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["recorded"] == [str(paths.run_dir)]
    assert [one["log"] for one in told["launches"]] == ["old.log"]
    assert chronicle(["forensics", str(tmp_path), "--out", str(out)]) == 0
    draft = out.read_text()
    assert draft.index("## Recorded by chronicle") < draft.index("## Launches by the steps")
    assert "launch 1: from " in draft and "; ended with code 1: crash" in draft


@pytest.mark.parametrize("words", [["nowhere"], ["a.log"]])
def test_what_is_no_directory_is_a_usage_error(tmp_path, monkeypatch, words, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.log").write_text("")
    assert chronicle(["forensics", *words]) == 2
    assert "is not a directory" in capsys.readouterr().err

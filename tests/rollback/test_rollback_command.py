"""`chronicle rollback`, `apply`, `undo`, `recover` at the command line: exit codes, words, nothing changed on refusal."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from chronicle.cli.main import run
from chronicle.journal import JournalWriter, read_journal
from chronicle.paths import RunPaths
from rollback.files.state_file import read_state_file, write_edited_copy
from rollback.plan.plan import plan_digest
from tests.attacks.companions import healthy
from tests.builders.story_runs import StoryRun
from tests.rollback.accelerate_runs import make_run
from tests.rollback.command_line import chronicle, places
from tests.rollback.disks import picture
from tests.rollback.lr_cases import FUNCTIONS

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@pytest.fixture
def top(pristine: Path, tmp_path: Path) -> Path:
    subprocess.run(["cp", "-a", str(pristine / "checkpoints"), str(tmp_path)], check=True)
    return tmp_path


def test_step_between_two_checkpoints_is_an_error_naming_both(top: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = picture(top / "checkpoints")
    assert chronicle(top, "rollback", "--to", "12", "--yes") == 1
    said = capsys.readouterr().err
    assert "10" in said and "15" in said and "no checkpoint of step 12" in said
    assert picture(top / "checkpoints") == before


def test_without_terminal_and_without_yes_exit_2_and_nothing_changed(
    top: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = picture(top)
    assert chronicle(top, "rollback", "--to", "10", "--lr-scale", "0.5") == 2
    said = capsys.readouterr()
    assert "--yes" in said.err and "param_groups" in said.err and said.out == ""
    assert picture(top) == before


def test_dry_run_shows_the_plan_and_changes_nothing(top: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = picture(top)
    assert chronicle(top, "rollback", "--to", "10", "--lr-scale", "0.5", "--dry-run") == 0
    shown = capsys.readouterr().out
    for part in ("base_lrs.0", "→", "opt_step-15", "opt_step-20", "× 0.5", "CosineAnnealingLR", "computed"):
        assert part in shown
    assert picture(top) == before


@pytest.mark.parametrize("ended", [False, True])
def test_what_it_discards_is_counted_from_the_log_of_a_launch_whose_end_nobody_recorded(
    top: Path, capsys: pytest.CaptureFixture[str], ended: bool
) -> None:
    run = StoryRun(top, "r")
    run.start(1, 0)
    run.add("checkpoint", launch=1, step=20, data={"path": str(top / "checkpoints" / "opt_step-20")})
    run.metrics(1, {step: {"loss": 2.0} for step in range(1, 116)})
    if ended:
        run.end(1, 115)
    assert chronicle(top, "rollback", "--to", "10", "--dry-run", "--json") == 0
    assert json.loads(capsys.readouterr().out)["cost"]["steps"] == 105


def test_uninitialised_directory_gets_a_journal_and_is_told_where(
    top: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chronicle(top, "rollback", "--to", "10", "--yes") == 0
    assert str(top / "logs" / "r" / "journal") in capsys.readouterr().err
    kinds = [entry.kind for entry in read_journal(RunPaths(top / "logs" / "r")).entries]
    assert kinds == ["rollback.intent", "rollback.receipt"]


def test_written_plan_is_applied_as_shown(top: Path) -> None:
    plan = top / "plan.json"
    assert chronicle(top, "rollback", "--to", "10", "--lr-scale", "0.5", "--plan-out", str(plan)) == 0
    digest = json.loads(plan.read_text())["digest"]
    assert not (top / "logs").exists()
    assert chronicle(top, "rollback", "--plan", str(plan), "--yes") == 0
    receipts = list(read_journal(RunPaths(top / "logs" / "r")).of_kind("rollback.receipt"))
    assert [entry.data["plan"] for entry in receipts] == [digest]
    assert sorted(p.name for p in (top / "checkpoints").iterdir()) == ["opt_step-10"]


def test_a_plan_beside_other_changes_is_refused(top: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file already says what is done: a factor beside it would be one that nobody applies."""
    plan = top / "plan.json"
    assert chronicle(top, "rollback", "--to", "10", "--plan-out", str(plan)) == 0
    for more in (["--lr-scale", "0.5"], ["--to", "10"], ["--keep-later"], ["--warmup", "3"], ["--dry-run"]):
        assert chronicle(top, "rollback", "--plan", str(plan), *more, "--yes") == 2, more
    assert not (top / "logs").exists() and "already says what is done" in capsys.readouterr().err


def test_a_plan_is_carried_out_once_and_again_only_after_an_undo(top: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Typed twice at 3 a.m.: the second time says so, changes nothing and is no error."""
    plan = top / "plan.json"
    assert chronicle(top, "rollback", "--to", "10", "--lr-scale", "0.5", "--plan-out", str(plan)) == 0
    assert chronicle(top, "rollback", "--plan", str(plan), "--yes") == 0
    after = picture(top / "checkpoints")
    capsys.readouterr()
    assert chronicle(top, "rollback", "--plan", str(plan), "--yes") == 0
    assert "already applied" in capsys.readouterr().out
    assert picture(top / "checkpoints") == after
    assert chronicle(top, "undo", "--yes") == 0
    assert chronicle(top, "rollback", "--plan", str(plan), "--yes") == 0
    assert "already" not in capsys.readouterr().out.rpartition("undo")[2]
    receipts = list(read_journal(RunPaths(top / "logs" / "r")).of_kind("rollback.receipt"))
    assert len(receipts) == 2


@pytest.mark.parametrize("change", ["file", "later", "plan"])
def test_apply_refuses_when_anything_changed_since_the_plan(
    top: Path, change: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = top / "plan.json"
    assert chronicle(top, "rollback", "--to", "10", "--lr-scale", "0.5", "--plan-out", str(plan)) == 0
    if change == "file":
        state = top / "checkpoints/opt_step-10/accelerator_state/optimizer.bin"
        write_edited_copy(read_state_file(state), {("param_groups", 0, "eps"): 1e-7}, top / "edited")
        os.replace(top / "edited", state)
    elif change == "later":
        os.rename(top / "checkpoints" / "opt_step-20", top / "elsewhere")
    else:
        plan.write_text(plan.read_text().replace('"keep_later": false', '"keep_later": true'))
    before = picture(top / "checkpoints")
    assert chronicle(top, "rollback", "--plan", str(plan), "--yes") == 3
    assert "since" in (said := capsys.readouterr().err) or "changed after it was planned" in said
    assert picture(top / "checkpoints") == before


def test_plan_with_another_purpose_than_its_request_is_refused(top: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A digest that fits is no proof: whoever writes a plan can write its digest, so nothing but the request is used."""
    plan = top / "plan.json"
    assert chronicle(top, "rollback", "--to", "15", "--lr", "3e-4", "--plan-out", str(plan)) == 3  # groups differ
    assert chronicle(top, "rollback", "--to", "15", "--lr-scale", "0.1", "--plan-out", str(plan)) == 0
    honest: dict[str, Any] = json.loads(plan.read_text())
    (top / "precious").mkdir()
    forgeries: list[dict[str, Any]] = [
        {"abandon": [{"name": "../precious", "step": 20, "launch": None}]},
        {"pointers": [{"path": "../precious/latest", "before": "", "after": "rm -rf", "is_link": False}]},
        {"edits": [["../../precious", ["param_groups", 0, "lr"], 1, 2]]},
        {"entry": "../precious"},
        {"source": "/etc"},
        {"source": "a\0b"},
        {"root": str(top)},
        {"expected": None},
        {"request": {"step": []}},
        {"v": True},
    ]
    for forged in forgeries:
        record = {key: value for key, value in (honest | forged).items() if key != "digest"}
        plan.write_text(json.dumps(record | {"digest": plan_digest(record)}))
        before = picture(top / "precious"), picture(top / "checkpoints")
        capsys.readouterr()
        assert chronicle(top, "apply", str(plan), "--yes") in (1, 3), forged
        assert "defect" not in capsys.readouterr().err, forged
        assert (picture(top / "precious"), picture(top / "checkpoints")) == before, forged


def test_absolute_lr_ends_exactly_there_when_groups_agree(tmp_path: Path) -> None:
    import torch

    from tests.rollback.accelerate_runs import used_lrs

    def same(optimizer: Any) -> Any:
        for group in optimizer.param_groups:
            group["lr"] = 1e-3
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)

    make_run(tmp_path / "checkpoints", same, "registered")
    assert chronicle(tmp_path, "rollback", "--to", "10", "--lr", "1.77e-05", "--yes") == 0
    used = used_lrs(tmp_path / "checkpoints" / "opt_step-10", same, "registered", 2)
    assert used == [(1.77e-05, 1.77e-05), (1.77e-05 * 0.97, 1.77e-05 * 0.97)]


def test_set_of_a_counter_is_refused_for_a_recursive_scheduler(top: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = picture(top / "checkpoints")
    assert chronicle(top, "rollback", "--to", "10", "--set", "last_epoch=5", "--yes") == 3
    said = capsys.readouterr().err
    assert "CosineAnnealingLR" in said and "alone" in said
    assert picture(top / "checkpoints") == before


def test_set_of_a_single_lr_field_is_refused_with_the_reason(top: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert chronicle(top, "rollback", "--to", "10", "--set", "base_lrs=1e-5", "--yes") == 3
    assert "--lr-scale" in capsys.readouterr().err


def test_set_of_an_unknown_field_lists_those_that_exist(top: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert chronicle(top, "rollback", "--to", "10", "--set", "last_epcoh=5", "--yes") == 3
    assert "last_epoch" in capsys.readouterr().err


def test_beta2_is_set_in_every_group_and_the_guard_is_told(top: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    def groups() -> Any:
        (path,) = (top / "checkpoints" / "opt_step-10").rglob("optimizer.bin")
        return torch.load(path, weights_only=False)["param_groups"]

    before = groups()
    assert chronicle(top, "rollback", "--to", "10", "--set", "beta2=1.5", "--yes") != 0
    assert chronicle(top, "rollback", "--to", "10", "--set", "beta2=0.95", "--yes") == 0
    assert groups() == [{**group, "betas": (0.9, 0.95)} for group in before]
    contract = json.loads(next(top.rglob("contract.json")).read_text())
    assert contract["accept_change"] == ["betas: beta2 was set by this rollback"] and contract["lr_ratio"] == 1.0
    assert "does not compare `beta2` with the save" in capsys.readouterr().out


def test_every_number_of_the_groups_can_be_set_and_is_accepted_by_its_name(top: Path) -> None:
    import torch

    assert chronicle(top, "rollback", "--to", "10", "--set", "weight_decay=0.2", "--set", "eps=1e-6", "--yes") == 0
    (path,) = (top / "checkpoints" / "opt_step-10").rglob("optimizer.bin")
    groups = torch.load(path, weights_only=False)["param_groups"]
    assert {(group["weight_decay"], group["eps"]) for group in groups} == {(0.2, 1e-6)}
    contract = json.loads(next(top.rglob("contract.json")).read_text())
    accepted = [text.partition(":")[0] for text in contract["accept_change"]]
    assert sorted(accepted) == ["eps", "weight_decay"] and contract["lr_ratio"] == 1.0


def test_moving_the_counter_of_a_lambda_moves_its_lr(tmp_path: Path) -> None:
    from tests.rollback.accelerate_runs import used_lrs

    root = tmp_path / "checkpoints"
    make_run(root, FUNCTIONS["lambda"], "registered")
    expected = used_lrs(root / "opt_step-20", FUNCTIONS["lambda"], "registered", 4)[1:]
    assert chronicle(tmp_path, "rollback", "--to", "10", "--set", "last_epoch=20", "--yes") == 0
    assert used_lrs(root / "opt_step-10", FUNCTIONS["lambda"], "registered", 4)[1:] == expected


@pytest.mark.parametrize("words", [["--warmup", "5"], ["--skip-batches", "3"], ["--reshuffle"]])
def test_what_the_trainer_would_have_to_do_is_refused_without_a_guard(
    top: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert chronicle(top, "rollback", "--to", "10", *words, "--yes") == 3
    assert words[0] in (said := capsys.readouterr().err) and "chronicle.guard" in said


def test_keep_later_leaves_them_and_says_so(top: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert chronicle(top, "rollback", "--to", "10", "--lr-scale", "0.5", "--keep-later", "--yes") == 0
    assert sorted(p.name for p in (top / "checkpoints").iterdir()) == ["opt_step-10", "opt_step-15", "opt_step-20"]
    assert "later checkpoints stay" in capsys.readouterr().out


def test_nothing_to_do_is_done(top: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert chronicle(top, "rollback", "--to", "20", "--yes") == 0
    assert "nothing to change" in capsys.readouterr().out
    assert chronicle(top, "undo", "--yes") == 0 and chronicle(top, "recover") == 0
    assert "nothing to recover" in capsys.readouterr().out


def test_open_intent_stops_everything_but_recover(top: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with JournalWriter(RunPaths(top / "logs" / "r")) as writer:
        data = {"root": str(top / "checkpoints"), "entry": "opt_step-10"}
        writer.append("rollback.intent", step=10, data=data)
    before = picture(top / "checkpoints")
    for words in (["rollback", "--to", "10", "--yes"], ["undo", "--yes"]):
        assert chronicle(top, *words) == 3
        assert "chronicle recover" in capsys.readouterr().err
    assert chronicle(top, "recover") == 0
    assert "reverted" in capsys.readouterr().out
    assert picture(top / "checkpoints") == before
    assert chronicle(top, "rollback", "--to", "10", "--yes") == 0


def test_a_live_run_elsewhere_is_not_touched_unless_forced_with_a_reason(
    top: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import time

    paths = RunPaths(top / "logs" / "r")
    with JournalWriter(paths) as writer:
        writer.append("launch.start", launch=1, data={"argv": [], "host": "node-7", "pid": 11})
    paths.heartbeats_dir.mkdir()
    beat = {"v": 1, "host": "node-7", "launch": 1, "pid": 11, "start_ticks": 5, "boot_id": "b", "uid": 0,
            "t": time.time(), "processes": []}  # fmt: skip
    (paths.heartbeats_dir / "node-7.json").write_text(json.dumps(beat))
    assert chronicle(top, "rollback", "--to", "10", "--yes") == 3
    assert "node-7" in capsys.readouterr().err
    assert chronicle(top, "rollback", "--to", "10", "--yes", "--force", "node-7 lost power") == 0
    intent = next(read_journal(paths).of_kind("rollback.intent"))
    assert intent.data["force"] == "node-7 lost power"


def test_second_writer_is_told_who_holds_the_lock(top: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from rollback.disk.lock import hold_lock

    with hold_lock(top / "logs" / "r" / "rollback.lock"):
        assert chronicle(top, "rollback", "--to", "10", "--yes") == 3
    assert f"process {os.getpid()}" in capsys.readouterr().err


def test_rollback_imports_nothing_heavy(top: Path) -> None:
    code = (
        "import sys\nfrom chronicle.cli.main import run\n"
        f"code = run({['rollback', '--to', '10', '--lr-scale', '0.5', '--yes', *places(top)]!r})\n"
        "heavy = {'torch', 'numpy', 'mlflow', 'pydantic', 'matplotlib', 'rich'} & set(sys.modules)\n"
        "assert code == 0 and not heavy, (code, heavy)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_link_to_a_checkpoint_that_moves_away_is_turned_and_turned_back(top: Path) -> None:
    """A dangling `last` would make a script fail, or silently start from scratch."""
    root = top / "checkpoints"
    (root / "last").symlink_to("opt_step-20")
    (root / "first").symlink_to("opt_step-10")
    before = picture(top / "checkpoints")
    assert chronicle(top, "rollback", "--to", "10", "--lr-scale", "0.5", "--yes") == 0
    assert (os.readlink(root / "last"), os.readlink(root / "first")) == ("opt_step-10", "opt_step-10")
    assert sorted(p.name for p in root.iterdir()) == ["first", "last", "opt_step-10"]
    assert chronicle(top, "undo", "--yes") == 0
    assert picture(top / "checkpoints") == before


def test_pointer_file_keeps_its_mode(top: Path) -> None:
    pointer = top / "checkpoints" / "latest"
    pointer.write_text("opt_step-20\n")
    pointer.chmod(0o640)
    before = picture(top / "checkpoints")
    assert chronicle(top, "rollback", "--to", "10", "--yes") == 0
    assert (pointer.read_text(), oct(pointer.stat().st_mode & 0o777)) == ("opt_step-10\n", oct(0o640))
    assert chronicle(top, "undo", "--yes") == 0
    assert picture(top / "checkpoints") == before


def test_of_two_rollbacks_at_once_one_wins_and_the_other_changes_nothing(top: Path) -> None:
    code = "import sys; from chronicle.cli.main import main; main(sys.argv[1:])"
    words = [
        ["rollback", "--to", "10", "--lr-scale", "0.5", "--yes"],
        ["rollback", "--to", "15", "--lr-scale", "0.5", "--yes"],
    ]
    running = [
        subprocess.Popen([sys.executable, "-c", code, *w, *places(top)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for w in words
    ]
    for process in running:
        process.communicate(timeout=120)
    codes = [process.returncode for process in running]
    entries = read_journal(RunPaths(top / "logs" / "r"))
    done = [entry.step for entry in entries.of_kind("rollback.receipt")]
    assert set(codes) <= {0, 1, 3} and len(done) == codes.count(0) >= 1
    assert chronicle(top, "recover") == 0
    for _ in done:
        assert chronicle(top, "undo", "--yes") == 0
    assert sorted(p.name for p in (top / "checkpoints").iterdir()) == ["opt_step-10", "opt_step-15", "opt_step-20"]


def test_a_step_that_is_there_and_abandoned_is_the_one_there_and_the_other_is_named(
    top: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither copy says who saved it: the step alone means the one in the directory, the path means either."""
    subprocess.run(["cp", "-a", str(top / "checkpoints/opt_step-20"), str(top / "kept")], check=True)
    assert chronicle(top, "rollback", "--to", "15", "--yes") == 0
    (away,) = (top / "abandoned").glob("*/opt_step-20")
    (top / "kept").rename(top / "checkpoints/opt_step-20")
    before = picture(top / "checkpoints")
    for words in (["verify", "20"], ["inspect", "20"], ["manifest", "20"], ["rollback", "--to", "20", "--dry-run"]):
        capsys.readouterr()
        assert chronicle(top, *words) == 0
        said = capsys.readouterr()
        assert f"step 20 was also abandoned: `{away}`" in said.out + said.err, words
    (top / "checkpoints/opt_step-20/manifest.chronicle.json").unlink(missing_ok=True)
    before = picture(top / "checkpoints")
    for path in (str(top / "checkpoints/opt_step-20"), str(away)):
        assert chronicle(top, "rollback", "--to", path, "--lr-scale", "0.5", "--yes") == 0
        assert chronicle(top, "undo", "--yes") == 0
        assert picture(top / "checkpoints") == before
    assert chronicle(top, "rollback", "--to", str(top / "logs"), "--yes") == 1
    assert "not a checkpoint of this run" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["undo"], ["recover"], ["rollback", "--to", "10"], ["prune"]])
def test_nothing_is_decided_on_a_journal_that_cannot_be_read_whole(
    top: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """An open intent could stand in the part that is missing: "nothing to undo" would be a guess."""
    assert chronicle(top, "rollback", "--to", "15", "--yes") == 0
    (top / "logs" / "r" / "journal" / "20260101T000000-other-1-aa.jsonl").mkdir()  # root reads everything but this
    before = picture(top / "checkpoints")
    assert chronicle(top, *words, *([] if words == ["recover"] else ["--yes"])) == 3
    assert "cannot be read" in capsys.readouterr().err
    assert picture(top / "checkpoints") == before


def test_a_file_of_another_step_stops_a_rollback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No edit of numbers mends that, unlike an LR that reached one file and not the other."""
    checkpoint = healthy(tmp_path / "checkpoints")
    (checkpoint / "trainer_state.json").write_text('{"global_step": 7}')
    before = picture(tmp_path / "checkpoints")
    assert chronicle(tmp_path, "rollback", "--to", "10", "--lr-scale", "0.5", "--yes") == 3
    said = capsys.readouterr().err
    for part in ("trainer_state.json", "global_step is 7", "the checkpoint has step 10", "restore the right file"):
        assert part in said
    assert picture(tmp_path / "checkpoints") == before


def test_a_checkpoint_that_is_only_a_link_is_named_as_one(top: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (top / "checkpoints" / "opt_step-15").rename(top / "elsewhere")
    (top / "checkpoints" / "opt_step-15").symlink_to("../elsewhere")
    assert chronicle(top, "rollback", "--to", "15", "--yes") == 1
    said = capsys.readouterr().err
    assert "symbolic link to `../elsewhere`" in said and "--checkpoints" in said
    assert chronicle(top, "inspect", str(top / "checkpoints" / "opt_step-15")) == 0


def test_a_path_that_is_not_there_is_said_to_be_missing(top: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(top / "checkpoints" / "opt_step-99")]) == 1
    said = capsys.readouterr().err
    assert "opt_step-99` does not exist" in said and "opt_step-10" in said


class Killed(BaseException):
    """The process is gone: nothing of it runs any more."""


@pytest.mark.parametrize("declared", ["--moved", "--fork-of"])
@pytest.mark.parametrize("stage", ["_publish_ready", "_finish", "_read_back"])
def test_in_a_copy_what_was_open_is_reverted_or_left_to_the_original(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, declared: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed before it was prepared, before its moves, and after them; then copied: every file has another inode.

    A move is known by its inode: before the first one all is as it was, later only the original can tell.
    """
    monkeypatch.chdir(tmp_path)
    one, other = tmp_path / "one", tmp_path / "other"
    root = Path("data/a/checkpoints")
    healthy(one / root)
    original = (one / root / "checkpoint-10/optimizer.pt").read_bytes()
    logs = ["--run", "r", "--logs", str(one / "home/p/logs"), "--checkpoints", str(one / root)]
    assert run(["init", *logs]) == 0
    with monkeypatch.context() as patch:

        def killed(*_: Any, **__: Any) -> None:
            raise Killed

        patch.setattr(f"rollback.transaction.protocol.{stage}", killed)
        run(["rollback", "--to", "10", "--lr-scale", "0.5", "--yes", *logs])
    subprocess.run(["cp", "-r", str(one), str(other)], check=True)
    before = picture(one)
    there = [word.replace(str(one), str(other)) for word in logs]
    assert run(["recover", *there]) == 3  # a copy: nobody has said what it is
    words = [declared] if declared == "--moved" else [declared, str(one / "home/p/logs/r")]
    assert run(["init", *words, *there]) == 0
    taken = picture(other / "data")
    capsys.readouterr()
    assert run(["recover", *there]) == (0 if stage == "_publish_ready" else 4)
    assert picture(one) == before
    if stage != "_publish_ready":
        said = capsys.readouterr().err
        assert "only there can it be told how far it had come" in said and picture(other / "data") == taken
        (workspace,) = (other / root).parent.glob(".chronicle-*")
        assert f"delete `{workspace}`" in said and (workspace / "transaction.json").is_file()
        shutil.rmtree(workspace)  # by hand, where the original is gone
        assert run(["recover", *there]) == 0
    assert run(["rollback", "--to", "10", "--dry-run", *there]) == 0 and picture(one) == before
    assert run(["recover", *logs]) == 0  # and the original can still be recovered
    assert ((one / root / "checkpoint-10/optimizer.pt").read_bytes() != original) == (stage != "_publish_ready")


def test_a_transaction_that_was_open_when_its_run_was_moved_is_finished_where_it_was_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    one, other = tmp_path / "one", tmp_path / "other"
    healthy(one / "checkpoints")
    state = one / "checkpoints" / "checkpoint-10" / "optimizer.pt"
    original = state.read_bytes()
    with monkeypatch.context() as patch:

        def killed(*_: Any, **__: Any) -> None:
            raise Killed

        patch.setattr("rollback.transaction.protocol._finish", killed)
        chronicle(one, "rollback", "--to", "10", "--lr-scale", "0.5", "--yes")
    one.rename(other)
    taken = picture(other / "checkpoints")
    assert chronicle(other, "recover") == 4 and picture(other / "checkpoints") == taken
    assert f"was begun in `{one / 'checkpoints'}`" in capsys.readouterr().err
    other.rename(one)
    assert chronicle(one, "recover") == 0 and state.read_bytes() != original
    assert chronicle(one, "undo", "--yes") == 0
    assert state.read_bytes() == original

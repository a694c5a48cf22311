"""`chronicle.goback`: a program goes back, undoes and is refused as the command is, and nobody is asked."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from chronicle import goback
from chronicle.journal import read_journal
from chronicle.settings import load_settings
from rollback.errors import IntentOpen
from rollback.plan.request import RollbackRequest
from rollback.transaction import protocol
from tests.rollback.command_line import chronicle
from tests.rollback.disks import Killed, picture

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def test_a_program_goes_back_and_undoes_to_the_byte(pristine: Path, tmp_path: Path) -> None:
    subprocess.run(["cp", "-a", str(pristine / "checkpoints"), str(tmp_path)], check=True)
    root = tmp_path / "checkpoints"
    settings = load_settings(tmp_path, {}, run="r", logs=tmp_path / "logs", checkpoints=root)
    before = picture(root)
    with goback.open_run(settings) as opened:
        plan = goback.plan(RollbackRequest(step=10, lr_scale=0.5), opened)
        made = goback.apply(plan, opened)
    assert sorted(path.name for path in root.iterdir()) == [plan.entry]
    with goback.open_run(settings) as opened:
        entry = goback.find_undoable(opened.journal.entries)
        assert entry is not None and entry.id == made.id
        goback.undo(opened, entry)
    assert picture(root) == before
    kinds = [entry.kind for entry in read_journal(settings.paths).entries if entry.kind != "run.place"]
    assert kinds == ["rollback.intent", "rollback.receipt", "undo.intent", "undo.receipt"]


def test_an_open_transaction_is_refused_until_it_is_recovered(
    pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(["cp", "-a", str(pristine / "checkpoints"), str(tmp_path)], check=True)
    settings = load_settings(tmp_path, {}, run="r", logs=tmp_path / "logs", checkpoints=tmp_path / "checkpoints")
    before = picture(tmp_path / "checkpoints")
    with monkeypatch.context() as patch, goback.open_run(settings) as opened:
        patch.setattr(protocol, "_run", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        plan = goback.plan(RollbackRequest(step=10), opened)
        with pytest.raises(KeyboardInterrupt):
            goback.apply(plan, opened)
    with pytest.raises(IntentOpen), goback.open_run(settings):
        pass
    with goback.open_run(settings, recovering=True) as opened:
        intent = next(iter(opened.journal.of_kind("rollback.intent")))
        assert goback.recover(opened, intent) is None
    assert picture(tmp_path / "checkpoints") == before
    assert chronicle(tmp_path, "rollback", "--to", "10", "--dry-run") == 0


@pytest.mark.parametrize("stopped_in", ["_publish_ready", "_finish"])
def test_in_a_copy_an_open_transaction_is_reverted_or_left_to_the_original(
    stopped_in: str, pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A move is known by its inode, which a copy does not have: before the first one all is as it was, later nobody guesses."""
    first, copy = tmp_path / "first", tmp_path / "copy"
    first.mkdir()
    subprocess.run(["cp", "-a", str(pristine / "checkpoints"), str(first)], check=True)
    before = picture(first / "checkpoints")
    with monkeypatch.context() as patch:
        patch.setattr(protocol, stopped_in, lambda *_: (_ for _ in ()).throw(Killed))
        assert chronicle(first, "rollback", "--to", "10", "--lr-scale", "0.5", "--yes") != 0
    subprocess.run(["cp", "-r", str(first), str(copy)], check=True)
    assert chronicle(copy, "init", "--fork-of", str(first / "logs" / "r")) == 0
    taken, kept = picture(copy / "checkpoints"), picture(first)
    capsys.readouterr()
    code = chronicle(copy, "recover")
    said = capsys.readouterr()
    assert picture(copy / "checkpoints") == taken and picture(first) == kept
    if stopped_in == "_publish_ready":
        assert code == 0 and chronicle(copy, "rollback", "--to", "10", "--dry-run") == 0
        return
    assert code == 4 and "only there can it be told how far it had come" in said.err and "transaction.json" in said.err
    assert chronicle(first, "recover") == 0 and chronicle(first, "undo", "--yes") == 0
    assert picture(first / "checkpoints") == before

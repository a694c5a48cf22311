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
from tests.rollback.disks import picture

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

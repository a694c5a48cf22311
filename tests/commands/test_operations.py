"""`chronicle undo --list` and `undo ID`: acts that changed something outside the journal, undone by the verb that did them."""

from pathlib import Path
from typing import Any

import pytest

from chronicle.journal import JournalWriter, read_journal
from chronicle.journal.events import Note, Pruned, Restarted
from chronicle.launch.admission import find_excluded
from chronicle.paths import RunPaths
from chronicle.runs import summarize_run
from tests.attacks.hostile_files import safetensors, torch_zip
from tests.attacks.pickle_bytes import optimizer, pickled, real, scheduler
from tests.commands.cli import Cli

PLACES = ("--run", "r", "--logs", "logs", "--checkpoints", "checkpoints")


@pytest.fixture
def where(tmp_path: Path) -> Path:
    """A run with two checkpoints and a stray."""
    for step in (10, 20):
        state = tmp_path / "checkpoints" / f"opt_step-{step}" / "accelerator_state"
        state.mkdir(parents=True)
        (state / "optimizer.bin").write_bytes(torch_zip(pickled(optimizer(lr=real(1e-3)))))
        (state / "custom_checkpoint_0.pkl").write_bytes(torch_zip(pickled(scheduler())))
        (state / "random_states_0.pkl").write_bytes(torch_zip(pickled(b"}")))
        (state / "model.safetensors").write_bytes(safetensors({}))
    (tmp_path / "checkpoints" / "opt_step-10" / "accelerator_state" / "custom_checkpoint_0.pkl.orig").write_bytes(b"backup")
    return tmp_path


def listed(chronicle: Cli, where: Path) -> list[Any]:
    done = chronicle("undo", "--list", *PLACES, "--json", cwd=where)
    assert done.code == 0, done.err
    return list(done.json)


def test_every_kind_of_act_is_listed_and_undone_by_its_id(where: Path, chronicle: Cli) -> None:
    stray = where / "checkpoints" / "opt_step-10" / "accelerator_state" / "custom_checkpoint_0.pkl.orig"
    later = where / "checkpoints" / "opt_step-20"
    paths = RunPaths(where / "logs" / "r")
    acts = [
        ("verify", "--quarantine", "--yes", *PLACES),
        ("hardware", "--exclude", "node7", "--reason", "Xid 64", "--run", "r", "--logs", "logs"),
        ("runs", "r", "--add-tag", "baseline", "--logs", "logs"),
        ("runs", "r", "--archive", "wrong tokenizer", "--logs", "logs"),
        ("rollback", "--to", "10", "--yes", *PLACES),
    ]
    for words in acts:
        done = chronicle(*words, cwd=where)
        assert done.code in (0, 5), done.err
    assert not stray.exists() and not later.exists()
    found = listed(chronicle, where)
    assert [row["kind"] for row in found] == ["quarantine", "hardware", "note", "note", "rollback.receipt"]
    assert all(row["can_be_undone"] for row in found)
    for row in reversed(found):
        done = chronicle("undo", row["id"], "--yes", *PLACES, cwd=where)
        assert done.code == 0, done.err
    assert stray.read_bytes() == b"backup" and later.exists()
    assert find_excluded(read_journal(paths).entries) == {}
    row = summarize_run(paths)
    assert row["tags"] == [] and row["archived"] is False
    assert not any(one["can_be_undone"] for one in listed(chronicle, where)[:5])
    for one in found:
        again = chronicle("undo", one["id"], "--yes", *PLACES, cwd=where)
        assert again.code != 0 and again.err.startswith("error: ") and again.err.count("\n") <= 2, again.err


def test_what_cannot_be_undone_says_why_in_a_sentence_and_words_of_people_are_no_acts(where: Path, chronicle: Cli) -> None:
    paths = RunPaths(where / "logs" / "r")
    with JournalWriter(paths) as writer:
        pruned = writer.write(
            Pruned(changed=True, deleted=("a",), kept=(), objects=(), bytes=1, root="checkpoints"), title="1 pruned"
        )
        writer.write(Restarted(decision="again"), title="goes on")
        writer.write(Restarted(decision="stop"), title="stops")
        writer.write(Note(text="data", tags=("data",)), title="the data look odd", refs=(pruned.id,))
    found = listed(chronicle, where)
    assert [(row["title"], row["can_be_undone"]) for row in found] == [("1 pruned", False), ("goes on", False)]
    done = chronicle("undo", found[0]["id"], "--yes", *PLACES, cwd=where)
    assert done.code == 3 and "what was deleted does not come back" in done.err
    assert "no operation `zzz`" in chronicle("undo", "zzz", "--yes", *PLACES, cwd=where).err

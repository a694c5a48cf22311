"""`chronicle note`: every field a chronicle by hand has, and nothing written when something makes no sense."""

from pathlib import Path

import pytest

from chronicle.journal import read_journal
from chronicle.paths import RunPaths
from tests.builders.story_runs import toy_run
from tests.commands.cli import Cli


def test_every_field_reaches_the_journal_and_the_page(tmp_path: Path, chronicle: Cli) -> None:
    run = toy_run(tmp_path)
    (tmp_path / "plot.png").write_bytes(b"png")
    words = ["note", "exp2: not far enough\nIt diverged again.", "--step", "15400", "--incident", "--seen", "divergence again"]
    words += ["--suspect", "hardware: Xid 64 | swap the node | refuted", "--suspect", "data", "--did", "lr: x1.00 -> x0.75"]
    words += ["--expect", "calm", "--rule", "go back further", "--host", "ip-1", "--tag", "exp2", "--attach", "plot.png"]
    assert chronicle(*words).code == 0
    entry = read_journal(run.paths).entries[-1]
    assert (entry.kind, entry.step, entry.title) == ("incident", 15400, "exp2: not far enough")
    assert entry.data["suspects"][0] == {
        "cause": "hardware", "claim": "Xid 64", "test": "swap the node", "verdict": "refuted",
    }  # fmt: skip
    assert entry.data["action"]["changes"] == [{"field": "lr", "before": "x1.00", "after": "x0.75"}]
    chronicle("render", "--no-plots")
    page = run.paths.chronicle_md.read_text()
    for part in ("☒ hardware: Xid 64", "**Seen.** divergence again", "`lr` x1.00 → x0.75", "**Expected.** calm"):
        assert part in page
    assert "- go back further" in page
    assert f"(objects/{entry.data['evidence'][0]['sha256'][:2]}/" in page
    assert any(x["title"] == "exp2: not far enough" for x in chronicle("status", "--json").json["open_incidents"])


def test_an_amendment_is_a_new_entry_and_the_page_tells_the_corrected_words(tmp_path: Path, chronicle: Cli) -> None:
    run = toy_run(tmp_path)
    first = chronicle("note", "Xid 63", "--json").json["id"]
    chronicle("note", "Xid 64, not 63", "--amend", first[-8:], "--seen", "in dmesg")
    assert [e.title for e in read_journal(run.paths).entries][-2:] == ["Xid 63", "Xid 64, not 63"]
    chronicle("render", "--no-plots")
    page = run.paths.chronicle_md.read_text()
    assert "Xid 64, not 63" in page and "in dmesg" in page and "| Xid 63 |" not in page


@pytest.mark.parametrize(
    "words",
    [
        ["--suspect", "x: y | z | maybe"],
        ["--suspect", ": y"],
        ["--did", "lr 1 2"],
        ["--amend", "ZZZZ", "--incident"],
        ["--step", "-4"],
    ],
)
def test_what_makes_no_sense_writes_nothing(words: list[str], tmp_path: Path, chronicle: Cli) -> None:
    done = chronicle("note", "title", *words)
    assert done.code == 2 and "expected" in done.err
    assert not (tmp_path / "logs").exists()


def test_without_text_the_editor_is_asked(tmp_path: Path, chronicle: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "editor.sh"
    script.write_text('#!/bin/sh\nprintf "typed title\\n# left out\\nbody\\n" > "$1"\n')
    script.chmod(0o755)
    monkeypatch.setenv("EDITOR", str(script))
    assert chronicle("note", "--run", "r").code == 0
    entry = read_journal(RunPaths(tmp_path / "logs" / "r")).entries[-1]
    assert (entry.title, entry.data["text"]) == ("typed title", "body")


def test_an_editor_that_fails_writes_nothing(tmp_path: Path, chronicle: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDITOR", "false")
    done = chronicle("note", "--run", "r")
    assert done.code == 1 and "nothing written" in done.err
    assert not (tmp_path / "logs").exists()


def test_an_attachment_that_is_missing_writes_nothing(tmp_path: Path, chronicle: Cli) -> None:
    assert chronicle("note", "x", "--attach", "nowhere.png", "--run", "r").code == 1
    assert not (tmp_path / "logs" / "r" / "journal").exists()


def test_init_twice_is_fine_and_quotes_what_needs_quoting(tmp_path: Path, chronicle: Cli) -> None:
    odd = tmp_path / 'ckpt "x" \\ y'
    odd.mkdir()
    assert chronicle("init", "--run", "r", "--checkpoints", str(odd)).code == 0
    assert chronicle("init").code == 0
    shown = chronicle("config", "show", "--json").json
    assert shown["run"]["value"] == "r" and shown["checkpoints"]["value"] == str(odd)
    assert len(read_journal(RunPaths(tmp_path / "logs" / "r")).entries) == 1

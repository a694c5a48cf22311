"""`chronicle show batch`: the first batch in words, and no text of it where the setting says so."""

from chronicle.journal import JournalWriter
from chronicle.journal.events import FirstBatchSeen
from chronicle.paths import RunPaths
from chronicle.story import read_story
from chronicle.story.chapters import tell_chapters
from tests.commands.cli import Cli


def written(chronicle: Cli, tmp_path) -> RunPaths:
    chronicle("init", "--run", "tr")
    paths = RunPaths(tmp_path / "logs" / "tr")
    seen = FirstBatchSeen(
        text="all-labels-masked: all labels are masked\n4 rows of 13 to 13 tokens\n   masked    13  a \x1b[31m b",
        batch={"num_rows": 4},
        findings=({"name": "all-labels-masked", "text": "all"},),
        revisions={"tokenizer": "ab12"},
    )
    with JournalWriter(paths) as journal:
        journal.write(seen, step=0, launch=1, title="first batch: 4 rows; all-labels-masked")
        journal.write(FirstBatchSeen(text="4 rows"), step=40, launch=1, title="first batch: 4 rows")
        journal.write(seen, step=80, launch=2, title="first batch: 4 rows; all-labels-masked")
    return paths


def test_newest_batch(chronicle: Cli, tmp_path) -> None:
    written(chronicle, tmp_path)
    out = chronicle("show", "batch").out
    for words in ("launch 2", "step 80", "all labels are masked", "tokenizer  ab12"):
        assert words in out
    assert "\x1b" not in out


def test_a_run_without_one_says_how_to_get_it(chronicle: Cli, tmp_path) -> None:
    chronicle("init", "--run", "tr")
    done = chronicle("show", "batch")
    assert (done.code, done.out) == (1, "")
    assert "tokenizer=" in done.err


def test_story_has_a_chapter_at_the_start_and_wherever_something_is_wrong(chronicle: Cli, tmp_path) -> None:
    chapters = tell_chapters(read_story(written(chronicle, tmp_path)))
    assert [one.entry.step for one in chapters if one.entry.kind == "guard.first_batch"] == [0, 80]


def test_setting_is_shown_and_read(chronicle: Cli, tmp_path) -> None:
    (tmp_path / "chronicle.toml").write_text('run = "tr"\nbatch_text = false\n', encoding="utf-8")
    assert chronicle("config", "show", "--json").json["batch_text"]["value"] == "false"

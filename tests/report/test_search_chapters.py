"""A replay, and a bisect with its trials, are chapters that a person can read."""

from pathlib import Path

from chronicle.journal import JournalWriter
from chronicle.journal.events import Replayed, Searched, Tried
from chronicle.paths import RunPaths
from chronicle.report.html import page_story
from chronicle.report.markdown import render_markdown
from chronicle.story.chapters import tell_chapters
from chronicle.story.read import read_story


def test_a_search_is_one_chapter_with_a_table_of_its_trials(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "logs" / "r")
    rows = ({"change": "a1b2", "verdict": "good", "why": "loss 2.1", "last_step": 40}, {"change": "c|d", "verdict": "skipped"})
    with JournalWriter(paths) as writer:
        writer.write(Tried(search="s", change="a1b2", verdict="good"), launch=1, title="trial: a1b2: good")
        found = Searched(axis="commits", search="s", answer="c|d is it", rows=rows, seconds=81.0)
        writer.write(found, launch=1, title="bisect: c|d is it")
        event = Replayed(verdict="data differ", why="another batch", evidence=("micro-batch 1",), compared=1, start=20,
                         checkpoint="x", replays=2, seconds=5.0)  # fmt: skip
        writer.write(event, launch=1, step=22, title="replay of step 22: data differ (another batch)")
    story = read_story(paths)
    text = render_markdown(story, picture=False)
    assert "trial: a1b2" not in text, "a trial has no chapter of its own"
    assert "| a1b2 | good: loss 2.1 | 40 |" in text and "| c\\|d | skipped |  |" in text
    assert "c|d is it (2 launches in a sandbox, in 1 min 21 s)" in text
    assert "1 step from the checkpoint of step 20, twice" in text and "**Evidence.** micro-batch 1" in text
    page = "".join(map(str, page_story(tell_chapters(story))))
    assert "<td>a1b2</td><td>good: loss 2.1</td>" in page and "'change':" not in page + text

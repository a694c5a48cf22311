"""A replay, and steps that were taken again, are chapters that a person can read."""

from pathlib import Path

from chronicle.journal import JournalWriter
from chronicle.journal.events import Replayed, StepsRetaken
from chronicle.paths import RunPaths
from chronicle.report.html import page_story
from chronicle.report.markdown import render_markdown
from chronicle.story.chapters import tell_chapters
from chronicle.story.read import read_story


def test_their_verdicts_are_told_with_what_was_compared(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "logs" / "r")
    with JournalWriter(paths) as writer:
        event = Replayed(verdict="data differ", why="another batch", evidence=("micro-batch 1",), compared=1, start=20,
                         checkpoint="x", replays=2, seconds=5.0)  # fmt: skip
        writer.write(event, launch=1, step=22, title="replay of step 22: data differ (another batch)")
        again = StepsRetaken(verdict="equal", why="equal on 2 ranks", earlier=1, start=20, first=21, last=30, parts=("batch",),
                             changed=("torch: 2.8 → 2.9",))  # fmt: skip
        writer.write(again, launch=2, step=20, title="taken again")
    story = read_story(paths)
    text = render_markdown(story, picture=False)
    assert "1 step from the checkpoint of step 20, twice" in text and "**Evidence.** micro-batch 1" in text
    assert "equal: equal on 2 ranks" in text and "steps 21 to 30 with launch 1: batch" in text
    page = "".join(map(str, page_story(tell_chapters(story))))
    assert "equal on 2 ranks" in page and "torch: 2.8 → 2.9" in page

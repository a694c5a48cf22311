"""The index of a large journal is a cache: with it, without it, stale, damaged or gone, every answer is the same."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chronicle.journal import index as index_module
from chronicle.journal import read_journal
from chronicle.journal.index import JournalIndex, open_index
from tests.builders.story_runs import StoryRun, toy_run
from tests.commands.cli import Cli
from tests.commands.conftest import chronicle

__all__ = ["chronicle"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every journal counts as large; the cache lies in this test's directory."""
    monkeypatch.setattr(index_module, "LARGE_BYTES", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CHRONICLE_CACHE", raising=False)
    return tmp_path / "cache" / "chronicle"


def opened(story: StoryRun) -> JournalIndex:
    index = open_index(story.paths)
    assert index is not None
    return index


def everything(story: StoryRun) -> list[str]:
    index = opened(story)
    try:
        return [e.id for e in index.newest(10**9)]
    finally:
        index.close()


def whole(story: StoryRun) -> list[str]:
    return [e.id for e in read_journal(story.paths).entries]


def test_it_gives_the_entries_of_the_journal_in_the_same_order(tmp_path: Path, cache: Path) -> None:
    story = toy_run(tmp_path)
    other = StoryRun(tmp_path, start=story.now)
    other.add("note", title="from another writer")
    story.add("note", title="and back")
    assert everything(story) == whole(story)
    index = opened(story)
    assert index.heads() == read_journal(story.paths).heads
    assert [e.kind for e in index.journal(["checkpoint", "note"]).entries] == ["checkpoint", "checkpoint", "note", "note"]
    assert [e.title for e in index.newest(1)] == [read_journal(story.paths).entries[-1].title]
    assert sum(index.counts().values()) == len(whole(story))
    index.close()


def test_it_takes_in_what_was_appended_and_only_that(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    story = toy_run(tmp_path)
    everything(story)
    story.add("note", title="new")
    size = next(story.paths.journal_dir.glob("*.jsonl")).stat().st_size
    begun: list[int] = []
    real = JournalIndex._rows

    def rows(self: JournalIndex, path: Path, state: index_module._State) -> Iterator[tuple[Any, ...]]:
        begun.append(state.consumed)
        return real(self, path, state)

    monkeypatch.setattr(JournalIndex, "_rows", rows)
    assert everything(story) == whole(story)
    assert len(begun) == 1 and size - 400 < begun[0] < size
    assert everything(story) == whole(story)
    assert len(begun) == 1  # nothing new, nothing read


def test_a_torn_tail_is_taken_in_when_it_is_whole(tmp_path: Path, cache: Path) -> None:
    story = toy_run(tmp_path)
    path = next(story.paths.journal_dir.glob("*.jsonl"))
    content = path.read_bytes()
    path.write_bytes(content[:-30])
    index = opened(story)
    assert [p.check for p in index.problems()] == ["torn-line"]
    index.close()
    with path.open("ab") as file:
        file.write(content[-30:])
    assert everything(story) == whole(story)
    index = opened(story)
    assert index.problems() == ()
    index.close()


def test_a_rewritten_file_is_read_anew_and_its_problems_are_those_of_the_reader(tmp_path: Path, cache: Path) -> None:
    story = toy_run(tmp_path)
    everything(story)
    path = next(story.paths.journal_dir.glob("*.jsonl"))
    lines = path.read_bytes().splitlines(keepends=True)
    lines[4] = b"garbage\n"
    path.write_bytes(b"".join(lines))
    assert everything(story) == whole(story)
    index = opened(story)
    assert {(p.check, p.line) for p in index.problems()} == {(p.check, p.line) for p in read_journal(story.paths).problems}
    index.close()


def test_a_damaged_cache_is_made_again(tmp_path: Path, cache: Path) -> None:
    story = toy_run(tmp_path)
    everything(story)
    (file,) = cache.glob("*.sqlite")
    file.write_bytes(b"not a database at all" * 500)
    assert everything(story) == whole(story)


def test_a_file_that_is_gone_is_forgotten(tmp_path: Path, cache: Path) -> None:
    story = toy_run(tmp_path)
    other = StoryRun(tmp_path, start=story.now)
    other.add("note", title="gone")
    everything(story)
    (story.paths.journal_dir / f"{other.writer.writer}.jsonl").unlink()
    assert everything(story) == whole(story)


def test_where_no_cache_can_be_written_the_journal_itself_answers(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert open_index(toy_run(tmp_path).paths) is None
    monkeypatch.setenv("CHRONICLE_CACHE", "off")
    assert open_index(toy_run(tmp_path, "other").paths) is None


WORDS = (["status", "--json"], ["log"], ["log", "-n", "3"], ["log", "--graph"], ["log", "--kind", "note", "--json"])


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_commands_say_the_same_with_and_without_it(
    words: list[str], tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, chronicle: Cli
) -> None:
    story = toy_run(tmp_path)
    for step in (6, 7, 8):
        story.add("checkpoint", launch=2, step=step, data={"path": f"opt_step-{step}"})
    story.add("note", title="a note")
    with_index = chronicle(*words).out
    assert list(cache.glob("*.sqlite"))
    monkeypatch.setenv("CHRONICLE_CACHE", "off")
    assert chronicle(*words).out == with_index

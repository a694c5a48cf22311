"""Every `chronicle …` line in the README and the documents is one that the command line understands."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chronicle.cli.main import _group

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "chronicle" / "skill" / "SKILL.md"]
BLOCK = re.compile(r"```(?:sh|bash)\n(.*?)```", re.DOTALL)
INDENTED = re.compile(r"^    (chronicle .*)$", re.MULTILINE)
PLACEHOLDER = re.compile(r"…|\.\.\.|<|\||\$\(|^N$|^ID$|NAME|DIR|FILE", re.MULTILINE)


def commands(text: str) -> Iterator[list[str]]:
    """Whole command lines of code blocks; those with something to fill in are left out."""
    fenced = [line for block in BLOCK.findall(text) for line in block.replace("\\\n", " ").splitlines()]
    for line in [*fenced, *INDENTED.findall(text)]:
        if not line.strip().startswith("chronicle "):
            continue
        words = shlex.split(line, comments=False) if "#" not in line else shlex.split(re.sub(r"\s+#\s.*$", "", line))
        if words[1].endswith(":"):
            continue  # what it says, not what is typed
        words = words[: words.index(">")] if ">" in words else words
        own = words[: words.index("--")] if "--" in words else words
        if not any(PLACEHOLDER.search(word) for word in own):
            yield words


FOUND = [(page.name, words) for page in PAGES for words in commands(page.read_text(encoding="utf-8"))]


def test_there_are_commands_to_look_at() -> None:
    assert len(FOUND) > 60 and {"README.md", "howto.md", "tutorial.md"} <= {name for name, _ in FOUND}


@pytest.mark.parametrize(("name", "words"), FOUND, ids=[f"{name}: {' '.join(words)}" for name, words in FOUND])
def test_the_command_line_understands_it(name: str, words: list[str]) -> None:
    command: Any = _group()
    arguments = words[1:]
    while hasattr(command, "get_command"):
        verb = arguments.pop(0)
        command = command.get_command(None, verb)
        assert command is not None, f"{name}: no such command `{verb}`"
    command.make_context(words[1], arguments)

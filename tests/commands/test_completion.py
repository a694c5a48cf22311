"""The Tab key: answers as a shell asks for them, nothing on stderr, no error into a prompt."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.builders.story_runs import toy_run
from tests.commands.cli import Cli


def offered(words: str, directory: Path) -> list[str]:
    """What bash would be offered for the last word."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("CHRONICLE_")}
    environ |= {"_CHRONICLE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
    code = "from chronicle.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", code], cwd=directory, env=environ, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.stdout.split()


def test_verbs_runs_steps_and_entries_are_offered(tmp_path: Path) -> None:
    toy_run(tmp_path)
    assert "status" in offered("chronicle st", tmp_path)
    assert offered("chronicle status --run t", tmp_path) == ["toy"]
    assert offered("chronicle rollback --to ", tmp_path) == ["10", "5"]
    assert offered("chronicle note --close ", tmp_path)[0] == "00000009"  # what is open comes first


def test_nothing_is_offered_and_nothing_said_where_there_is_no_run(tmp_path: Path) -> None:
    assert offered("chronicle show ", tmp_path) == []
    assert offered("chronicle status --run x", tmp_path) == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_asks_with_our_variable(shell: str, chronicle: Cli) -> None:
    assert "_CHRONICLE_COMPLETE" in chronicle("config", "completion", shell).out


def test_an_unknown_shell_is_a_usage_problem(chronicle: Cli) -> None:
    assert chronicle("config", "completion", "tcsh").code == 2

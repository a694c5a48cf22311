"""`chronicle --help` is grouped, complete and cheap, and says of each command what its own help says."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import typer

from chronicle.cli.main import ADVANCED, GROUPS, OLD_NAMES, SHOWN, VERBS, VerbGroup, run
from scripts.commands import render_reference


def shown(*words: str) -> str:
    """What the program prints at 80 columns."""
    environ = os.environ | {"COLUMNS": "80", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "chronicle.cli.main", *words]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout


def test_the_list_of_commands_is_grouped_in_whole_sentences_of_80_columns() -> None:
    text = shown("--help")
    assert all(len(line) <= 80 for line in text.splitlines()) and "..." not in text.replace("[ARGS]...", "")
    for title, commands in GROUPS.items():
        assert f"{title}:\n" in text
        for verb, (_, summary) in commands.items():
            assert f"  {verb:<12}  {summary}\n" in text


def test_a_command_line_one_can_hold_in_mind() -> None:
    """About 25 verbs with their summaries; the rarely typed ones are only named, old names are not."""
    text = shown("--help")
    assert 20 <= len(SHOWN) <= 28
    named = text.partition("Advanced")[2]
    assert all(verb in named for verb in ADVANCED)
    assert not any(f" {verb} " in text for verb in OLD_NAMES if verb not in ("apply", "spikes"))


def test_help_all_says_what_each_verb_does_and_what_became_of_the_old_ones() -> None:
    text = shown("help", "all")
    assert all(f"  {verb:<12}  {summary}\n" in text for verb, (_, summary) in ADVANCED.items())
    assert all(f"  {verb:<12}  chronicle {words}\n" in text for verb, words in OLD_NAMES.items())


def test_what_an_old_name_stands_for_is_in_the_help_of_the_verb_named() -> None:
    for verb, words in OLD_NAMES.items():
        today, *options = words.split()
        assert f"\n## chronicle {verb}\n" not in render_reference()
        assert shown(verb, "--help").startswith("Usage: chronicle")
        assert all(word in shown(today, "--help") for word in options if word.startswith("--")), words


def test_the_summary_of_each_command_is_the_first_line_of_its_help() -> None:
    for commands in (*GROUPS.values(), ADVANCED):
        for verb, (target, summary) in commands.items():
            module, _, name = target.partition(":")
            found = getattr(import_module(module), name)
            text = found.info.help if isinstance(found, typer.Typer) else inspect.getdoc(found)
            assert (text or "").splitlines()[0] == summary, verb


def test_each_command_is_in_one_group() -> None:
    assert len(VERBS) == sum(map(len, GROUPS.values())) + len(ADVANCED)
    assert not set(VERBS) & set(OLD_NAMES) and set(VERBS) <= set(VerbGroup(name="chronicle").list_commands(None))


def test_the_list_of_commands_imports_none_of_them() -> None:
    """It was 0.7 s of processor time when it did."""
    code = (
        "import sys\nfrom chronicle.cli.main import run\nassert run(['--help']) == 0\n"
        "loaded = [name for name in sys.modules if name.startswith('chronicle.')]\n"
        "assert not {'chronicle.story', 'chronicle.report', 'chronicle.launch', 'chronicle.cli.status'} & set(loaded), loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_help_is_found_by_every_usual_way(capsys: pytest.CaptureFixture[str]) -> None:
    """`-h`, `--help`, and a command that only groups others; none of them is an error."""
    for words in (["-h"], ["data", "-h"], ["data"], ["note", "--help"]):
        assert run(words) == 0
        said = capsys.readouterr()
        assert said.out.startswith("Usage: chronicle") and said.err == ""


def test_a_mistyped_command_is_answered_with_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["statsu"]) == 2
    assert capsys.readouterr().err == "error: no command `statsu`\nhint: did you mean `chronicle status`?\n"
    assert run(["note", "--stp", "3", "text"]) == 2
    assert "--step" in capsys.readouterr().err


def test_rare_options_stand_in_the_whole_help_alone() -> None:
    """`rollback --help` had 25 options; every one of them can still be typed."""
    short, whole = shown("rollback", "--help"), shown("rollback", "--help-all")
    assert "more options: --help-all" in short and "--lr-in" not in short and len(short.splitlines()) <= 34
    assert "--lr-in" in whole and "more options" not in whole and whole.count("\n  --") > short.count("\n  --") + 6
    assert "Old names" in shown("--help-all") and shown("--help-all") == shown("help", "all")

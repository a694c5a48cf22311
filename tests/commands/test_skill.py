"""The skill for agents: every command in it exists, none of them acts on a run, and nobody's file is overwritten."""

from pathlib import Path

from chronicle.skill import skill_text
from tests.commands.cli import Cli
from tests.docs.test_commands_in_docs import commands

ACTS = {"undo", "recover", "run", "prune", "ps", "sweep", "hardware", "close", "init", "import", "apply"}


def test_no_command_of_the_skill_changes_a_run() -> None:
    typed = list(commands(skill_text()))
    assert len(typed) >= 13 and not {words[1] for words in typed} & ACTS
    rollbacks = [words for words in typed if words[1] == "rollback"]
    assert rollbacks and all({"--dry-run", "--plan-out"} & set(words) for words in rollbacks)
    assert not any({"--yes", "--force", "--plan"} & set(words) for words in typed)
    assert skill_text().startswith("---\nname: chronicle\ndescription: ")


def test_it_is_installed_once_and_overwrites_no_strangers_file(tmp_path: Path, chronicle: Cli) -> None:
    assert chronicle("skill", cwd=tmp_path).out.startswith("---\nname: chronicle\n")
    first = chronicle("skill", "--install", "skills", "--json")
    target = tmp_path / "skills" / "chronicle" / "SKILL.md"
    assert first.json["changed"] is True and target.read_text() == skill_text()
    assert chronicle("skill", "--install", "skills", "--json").json["changed"] is False
    target.write_text("---\nname: chronicle\ndescription: an older one\n---\n")
    assert chronicle("skill", "--install", "skills", "--json").json["changed"] is True
    target.write_text("mine")
    refused = chronicle("skill", "--install", "skills")
    assert refused.code == 3 and "is not ours" in refused.err and target.read_text() == "mine"
    (tmp_path / "file").write_text("x")
    assert chronicle("skill", "--install", "file").code == 1


def test_without_a_directory_it_is_installed_where_agents_look(tmp_path: Path, chronicle: Cli) -> None:
    assert chronicle("skill", "--install", cwd=tmp_path).out == ".agents/skills/chronicle/SKILL.md\n"
    assert (tmp_path / ".agents" / "skills" / "chronicle" / "SKILL.md").is_file()
    refused = chronicle("skill", "elsewhere", cwd=tmp_path)
    assert refused.code == 2 and "without --install" in refused.err

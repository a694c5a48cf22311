"""`chronicle skill`: the skill for agents that watch runs, printed or put where they look for skills."""

from pathlib import Path
from typing import Annotated

import typer

from chronicle.cli.options import CommandResult, JsonOption
from chronicle.errors import ChronicleError

__all__ = ["skill"]


def skill(
    install: Annotated[
        Path | None, typer.Option("--install", help="Write DIR/chronicle/SKILL.md, as in .agents/skills.", metavar="DIR")
    ] = None,
    json: JsonOption = False,
) -> CommandResult:
    """Print the skill for agents that watch runs, or install it.

    It says what they may read and write, and that they act on a run only as plans that a person confirms.

    Example: chronicle skill --install .agents/skills
    """
    from chronicle.skill import install_skill, skill_text

    if install is None:
        return CommandResult(text=skill_text().rstrip("\n"), data={"skill": skill_text()})
    try:
        target, changed = install_skill(install)
    except OSError as problem:
        why = problem.strerror or problem
        raise ChronicleError(f"cannot write below `{install}`: {why}", "name another directory") from problem
    talk = () if changed else ("it was there already",)
    return CommandResult(text=str(target), data={"path": str(target), "changed": changed}, talk=talk)

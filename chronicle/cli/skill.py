"""`chronicle skill`: the skill for agents that watch runs, printed or put where they look for skills."""

from pathlib import Path

from chronicle.cli.options import CommandResult, JsonOption
from chronicle.errors import ChronicleError, UsageProblem


def skill(directory: Path | None = None, install: bool = False, json: JsonOption = False) -> CommandResult:
    """Print the skill for agents that watch runs, or install it.

    It says what they may read and write, and that they act on a run only as plans that a person confirms.

    Example: chronicle skill --install

    For another agent: chronicle skill --install ~/.config/my-agent/skills

    Options:
      [DIR]: Where it looks for skills [.agents/skills].
      --install: Write DIR/chronicle/SKILL.md.
    """
    from chronicle.skill import install_skill, skill_text

    if directory is not None and not install:
        raise UsageProblem(f"`{directory}` without --install: expected `chronicle skill --install {directory}`")
    if not install:
        return CommandResult(raw=skill_text(), data={"skill": skill_text()})
    chosen = (directory or Path(".agents/skills")).expanduser()
    try:
        target, changed = install_skill(chosen)
    except OSError as problem:
        why = problem.strerror or problem
        raise ChronicleError(f"cannot write below `{chosen}`: {why}", "name another directory") from problem
    talk = () if changed else ("it was there already",)
    return CommandResult(raw=str(target), data={"path": str(target), "changed": changed}, talk=talk)

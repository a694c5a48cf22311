"""The skill that agents read: `SKILL.md`, and how it gets to where they look for it."""

from pathlib import Path

from chronicle.errors import Refusal
from rollback.disk.durable import write_atomic

__all__ = ["install_skill", "skill_text"]

NAME = "chronicle"


def skill_text() -> str:
    """The text of the skill, with its front matter."""
    return (Path(__file__).parent / "SKILL.md").read_text(encoding="utf-8")


def install_skill(directory: Path) -> tuple[Path, bool]:
    """Write `directory/chronicle/SKILL.md`; returns its path and whether it changed.

    An older one of ours is replaced. Raises `Refusal` where a file of another origin lies there, OSError where nothing can
    be written.
    """
    target = directory / NAME / "SKILL.md"
    text = skill_text()
    try:
        known = target.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        known = None
    if known == text:
        return target, False
    if known is not None and f"\nname: {NAME}\n" not in known[:200]:
        raise Refusal(f"`{target}` exists and is not ours; nothing was written", "name another directory")
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(target, text)
    return target, True

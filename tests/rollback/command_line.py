"""The commands on a folder that holds `checkpoints` and `logs/r`, as the fixture `top` makes it."""

from __future__ import annotations

from pathlib import Path

from chronicle.cli.main import run


def places(top: Path) -> list[str]:
    return ["--run", "r", "--logs", str(top / "logs"), "--checkpoints", str(top / "checkpoints")]


def chronicle(top: Path, *words: str) -> int:
    return run([*words, *places(top)])

"""What a command and its script tell by their text: which places it names outside, and where its state has a key."""

import re
from collections.abc import Sequence
from pathlib import Path

from chronicle.errors import UsageProblem
from rollback.checkpoint.below import listed_in


def refuse_outside(command: Sequence[str], cwd: Path) -> None:
    """Refuse a command without `{out}` that names a place outside the working directory to write to.

    What it reads exists and holds something. A place that does not exist, an empty directory and a directory of checkpoints
    are written to.
    """
    for number, word in enumerate(command):
        option, equals, value = word.rpartition("=")
        path = cwd / value
        if "/" not in value or path.resolve().is_relative_to(cwd) or not path.parent.parent.is_dir():
            continue
        why = _is_written_to(path)
        if why:
            named = option + equals or f"{command[number - 1]} "
            raise UsageProblem(
                f"`{value}` is outside of this directory, and {why}: the launches would write there",
                f"write `{named}{{out}}`, and each launch gets a directory of its own",
            )


def _is_written_to(path: Path) -> str:
    if not path.is_dir():
        return "" if path.exists() else "does not exist yet"
    if not any(path.iterdir()):
        return "is empty"
    return "holds checkpoints" if listed_in(path) else ""


def lines_with(command: Sequence[str], cwd: Path, key: str) -> str:
    """Where the script has a key in quotes, as `train.py:31, 47: `ema``; "" where it has it nowhere."""
    said = []
    for script in [cwd / word for word in command if word.endswith(".py") and (cwd / word).is_file()]:
        lines = enumerate(script.read_text(errors="replace").splitlines(), start=1)
        numbers = [str(number) for number, line in lines if re.search(f"[\"']{key}[\"']", line.partition("#")[0])]
        if numbers:
            said.append(f"{script.name}:{', '.join(numbers[:3])}: `{key}`")
    return "; ".join(said)

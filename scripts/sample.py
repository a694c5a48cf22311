"""Put the output of a played demo into the README.

`python examples/demo.py --directory DIR`, then `python scripts/sample.py DIR`.
The block of the README that begins with `$ chronicle status` becomes what the commands print in that directory, and
docs/lineage.png the picture of that run. Nothing is typed by hand.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = ("chronicle status", "chronicle log --graph")
BLOCK = re.compile(r"```console\n\$ chronicle status\n.*?```\n", re.DOTALL)


def sample(directory: Path) -> str:
    """The commands and what they print there."""
    lines = []
    for command in COMMANDS:
        words = [sys.executable, "-m", "chronicle_ml", *command.split()[1:]]
        done = subprocess.run(words, cwd=directory, capture_output=True, text=True, check=True)
        lines += [f"$ {command}", *done.stdout.splitlines()]
    return "\n".join(["```console", *lines, "```", ""])


def main() -> None:
    """Rewrite the README and the picture."""
    directory, readme = Path(sys.argv[1]), ROOT / "README.md"
    made = sample(directory)
    text, count = BLOCK.subn(lambda _: made, readme.read_text(encoding="utf-8"))
    if count != 1:
        raise SystemExit(f"{readme}: expected one block that begins with `$ chronicle status`, found {count}")
    readme.write_text(text, encoding="utf-8")
    shutil.copyfile(directory / "logs/demo/plots/lineage.png", ROOT / "docs/lineage.png")


if __name__ == "__main__":
    main()

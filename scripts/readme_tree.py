"""Write the README's tree from the modules' own first sentences; `--check` exits 5 when it is stale. Standard library only."""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("rollback", "chronicle", "bit_transformer", "experiments")
BEGIN, END = "<!-- tree:begin -->\n", "<!-- tree:end -->"
NAME_COLUMNS, LINE_COLUMNS = 34, 140


def main() -> int:
    """Rewrite the README between the markers, or compare."""
    readme = ROOT / "README.md"
    old = readme.read_text(encoding="utf-8")
    head, rest = old.split(BEGIN)
    new = head + BEGIN + "```\n" + "\n".join(tree()) + "\n```\n" + END + rest.split(END)[1]
    if "--check" in sys.argv:
        if new != old:
            print("README tree is stale: run python scripts/readme_tree.py", file=sys.stderr)
            return 5
        return 0
    readme.write_text(new, encoding="utf-8")
    return 0


def tree() -> list[str]:
    """One line a file, packages and folders first in name order."""
    lines: list[str] = []
    for package in PACKAGES:
        lines += folder(ROOT / package, 0)
    return lines


def folder(directory: Path, depth: int) -> list[str]:
    """The lines of one folder: itself, its files, its folders."""
    if not any(directory.rglob("*.py")):
        return []
    lines = [line(directory.name + "/", first_sentence(directory / "__init__.py"), depth)]
    for path in sorted(directory.glob("*.py")):
        if path.name != "__init__.py":
            lines.append(line(path.name, first_sentence(path), depth + 1))
    for child in sorted(p for p in directory.iterdir() if p.is_dir() and p.name != "__pycache__"):
        lines += folder(child, depth + 1)
    return lines


def line(name: str, sentence: str, depth: int) -> str:
    """Name and sentence in two columns."""
    left = "  " * depth + name
    return f"{left:<{NAME_COLUMNS}} {sentence}".rstrip()[:LINE_COLUMNS]


def first_sentence(path: Path) -> str:
    """The first sentence of a module's docstring, without its full stop."""
    if not path.exists():
        return ""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    sentence = " ".join(text.split("\n\n")[0].split())
    return sentence.split(". ")[0].rstrip(".")


if __name__ == "__main__":
    sys.exit(main())

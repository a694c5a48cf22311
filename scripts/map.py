"""Write docs/map.md, one line for every file of the four packages, from the files' own first sentences.

`--check` writes nothing and exits 5 when the page is out of date. Standard library only.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("rollback", "chronicle", "bit_transformer", "experiments")
PAGE = "docs/map.md"
HEAD = """# Map of the source tree

Every file with the first sentence of its docstring. `python scripts/map.py` writes this page; `make lint` checks it.
Imports point one way: `experiments` → `bit_transformer` → `chronicle` → `rollback`.
"""


def main() -> int:
    """Write the page, or compare it with what would be written."""
    page = ROOT / PAGE
    new = HEAD + "".join(section(ROOT / package) for package in PACKAGES)
    if "--check" not in sys.argv:
        page.write_text(new, encoding="utf-8")
    elif not page.exists() or page.read_text(encoding="utf-8") != new:
        print(f"error: `{PAGE}` is out of date\nhint: python scripts/map.py", file=sys.stderr)
        return 5
    return 0


def section(folder: Path) -> str:
    """A heading for a folder, what it is for, a table of its files, then the same for the folders inside."""
    if not any(folder.rglob("*.py")):
        return ""
    level = "#" * min(2 + len(folder.relative_to(ROOT).parts) - 1, 4)
    text = f"\n{level} {folder.relative_to(ROOT).as_posix()}/\n\n"
    about = first_sentence(folder / "__init__.py")
    text += f"{about}\n\n" if about else ""
    rows = [f"| [{path.name}](../{path.relative_to(ROOT).as_posix()}) | {first_sentence(path)} |" for path in files(folder)]
    text += "\n".join(["| file | what it holds |", "|---|---|", *rows]) + "\n" if rows else ""
    return text + "".join(section(child) for child in sorted(folder.iterdir()) if child.is_dir())


def files(folder: Path) -> Iterator[Path]:
    """Modules of a folder by name, `__init__.py` excepted."""
    return (path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py")


def first_sentence(path: Path) -> str:
    """The first sentence of a module's docstring on one line; empty where there is none."""
    if not path.exists():
        return ""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(text.split("\n\n")[0].split())
    sentence, stop, _ = paragraph.partition(". ")
    return (sentence + stop.strip()).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())

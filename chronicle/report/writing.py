"""Write a generated page whole or not at all: a reader never sees half of it."""

import os
from pathlib import Path

__all__ = ["write_page"]


def write_page(path: Path, text: str) -> None:
    """Replace the file in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)

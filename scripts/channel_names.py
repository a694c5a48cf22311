"""Lint: channel names stand in one table, `rollback/channels.py`, and in no other literal list.

    python scripts/channel_names.py [FOLDER ...]

An error is a literal list, tuple or set with two or more channel names, and a literal dict that maps one name of a role
to another. A dict of measurements under our own names (`{"loss": loss, "lr": lr}`) is none. Exit code 1 when there is one.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rollback.channels import TABLE, Role

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("rollback", "chronicle", "bit_transformer", "experiments", "scripts")
THE_TABLE = ROOT / "rollback" / "channels.py"
NAMES: dict[str, Role] = {name: row.role for row in TABLE for name in (row.canonical, *row.aliases) if name is not None}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print each second list of channel names; return 1 when there is one."""
    folders = [Path(name) for name in (sys.argv[1:] if arguments is None else arguments)] or [ROOT / name for name in PACKAGES]
    found = [line for folder in folders for path in sorted(folder.rglob("*.py")) for line in check(path)]
    print("\n".join(found) if found else "channel names: one table", file=sys.stderr if found else sys.stdout)
    return 1 if found else 0


def check(path: Path) -> Iterator[str]:
    """Yield one line for each second list of channel names in a file."""
    if path.resolve() == THE_TABLE:
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        names = _listed(node)
        if names:
            yield f"{path}:{node.lineno}: channel names {', '.join(names)}: expected `rollback.channels` to be asked"  # type: ignore[attr-defined]


def _listed(node: ast.AST) -> list[str]:
    """The channel names of a literal, when there are two that make it a list of names."""
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        names = _names(node.elts)
        return names if len(names) > 1 else []
    if isinstance(node, ast.Dict):
        names = _names([*(key for key in node.keys if key is not None), *node.values])
        roles = [NAMES[name] for name in names]
        return names if len(set(roles)) < len(roles) else []
    return []


def _names(nodes: Sequence[ast.expr]) -> list[str]:
    """Distinct channel names among string literals, the way the table compares them; bytes count as text."""
    texts = [node.value for node in nodes if isinstance(node, ast.Constant)]
    plain = [text.decode("ascii", "replace") if isinstance(text, bytes) else text for text in texts]
    lowered = [text.lower().replace(" ", "_") for text in plain if isinstance(text, str)]
    return sorted({name for name in lowered if name in NAMES})


if __name__ == "__main__":
    raise SystemExit(main())

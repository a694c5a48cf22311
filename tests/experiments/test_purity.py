"""Modules that decide import nothing that acts: no clock, no disk, no processes, no dice."""

import ast
from pathlib import Path

import pytest

HOUSE = Path(__file__).parents[2] / "experiments"
PURE = ("definition", "design", "gates", "history", "outcomes", "statistics", "tables", "verdicts")
FORBIDDEN = {"os", "subprocess", "time", "random", "secrets", "datetime"}


def imported(module: str) -> set[str]:
    tree = ast.parse((HOUSE / f"{module}.py").read_text(encoding="utf-8"))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("module", PURE)
def test_modules_that_decide_import_nothing_that_acts(module: str) -> None:
    assert not imported(module) & FORBIDDEN


def test_the_check_would_notice() -> None:
    assert imported("runner") & FORBIDDEN == {"subprocess", "time"}

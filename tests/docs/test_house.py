"""`scripts/house.py` counts what its docstrings say: a small tree with one of each."""

import ast
import importlib.util
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.conftest import GROUPS

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "house.py"
CLAIM = re.compile(r"\bPure\b")  # as a module docstring says it: "Pure." or "Pure: no clock"

TREE = {
    "rollback/__init__.py": '"""Package."""\n',
    "rollback/a.py": "from rollback import b\n\n\ndef undocumented(): ...\n\n\nclass Twice:\n    def method(self): ...\n",
    "rollback/b.py": 'def back():\n    """Closes the circle."""\n    from rollback import a\n    return a\n',
    "rollback/deep.py": 'def last():\n    """End of the path."""\n',
    "chronicle/__init__.py": "",
    "chronicle/journal/events.py": 'class Kind(StrEnum):\n    RECEIPT = "rollback.receipt"\n    NOTE = "note"\n',
    "chronicle/other.py": 'class Twice:\n    """Two."""\n\n\nif entry.kind == "note":\n    x = ["note", "rollback.receipt"]\n',
    "chronicle/cli/rollback.py": "from rollback.deep import last\n\n\ndef rollback():\n    last()\n",
}


@pytest.fixture(scope="module")
def house() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("house", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["house"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_each_figure_counts_what_it_says(house: ModuleType, tmp_path: Path) -> None:
    """One single importer, one shared name, two literals, one cycle, a path of two files."""
    for name, text in TREE.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    figures = {figure.what: figure for figure in house.measure(house.read_modules(tmp_path), tmp_path)}
    assert len(TREE) == figures["files"].value
    assert figures["modules with exactly one importer"].counted == (
        "rollback.a <- rollback.b", "rollback.b <- rollback.a", "rollback.deep <- chronicle.cli.rollback",
    )  # fmt: skip
    assert figures["public names defined in more than one file"].counted == ("Twice: chronicle.other, rollback.a",)
    assert figures["entry-kind literals outside events.py"].counted == (
        "chronicle/other.py:5 'note'", "chronicle/other.py:6 'rollback.receipt'",
    )  # fmt: skip
    assert figures["public functions without a docstring"].counted == (
        "chronicle.cli.rollback.rollback", "rollback.a.Twice.method", "rollback.a.undocumented",
    )  # fmt: skip
    assert figures["import cycles"].counted == ("rollback.a <-> rollback.b",)
    path = figures["files on the `rollback` path to call depth 6"].counted
    assert path == ("chronicle/cli/rollback.py", "rollback/deep.py")


def test_a_room_above_its_row_is_said_and_rows_are_lowered_only(
    house: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One more line than the row allows is one sentence; `--lower` takes the smaller of row and figure, and keeps a reason."""
    monkeypatch.setattr(house, "BUDGETS", tmp_path / "budgets.toml")
    path = tmp_path / "chronicle" / "launch" / "a.py"
    path.parent.mkdir(parents=True)
    path.write_text('"""One string."""\n\nx = 1 if y and z else f"{y} {z}"  # a comment is no token\n', encoding="utf-8")
    figures = house.room_figures(tmp_path)
    assert figures["chronicle/launch"] == {"lines": 3, "tokens": 10} == figures["all"]
    assert figures["density of chronicle"]["booleans"] == figures["density of chronicle"]["conditionals"] == 1000
    rows = {**figures, "chronicle/launch": {"lines": 2, "tokens": 99, "reason": "why"}}
    assert house.find_above(figures, rows) == ["chronicle/launch: 3 lines, and its row in scripts/budgets.toml allows 2"]
    house.write_budgets(figures, rows)
    written = house.read_budgets(house.BUDGETS.read_text(encoding="utf-8"))
    assert written["chronicle/launch"] == {"lines": 2, "tokens": 10, "reason": "why"}
    assert house.find_above(figures, {}) == [f"{room} has no row in scripts/budgets.toml" for room in figures]


def test_every_file_of_the_groups_is_there() -> None:
    """A test file that is renamed keeps its group: a name in the table that nothing has would protect nothing."""
    tests = Path(__file__).resolve().parents[1]
    assert [place for places in GROUPS.values() for place in places if not (tests / place).exists()] == []


@pytest.fixture(scope="module")
def modules(house: ModuleType) -> dict[str, Any]:
    """The files of the four packages and of the benchmarks, read once."""
    return house.read_modules(ROOT, (*house.PACKAGES, "benchmarks"))


def test_no_module_imports_itself_through_others(house: ModuleType, modules: dict[str, Any]) -> None:
    """Nowhere in the four packages and the benchmarks, functions included."""
    assert house.import_cycles({name: house.imported_modules(module, modules) for name, module in modules.items()}) == ()


def test_a_module_that_says_it_is_pure_is_held_to_it(house: ModuleType, modules: dict[str, Any]) -> None:
    """The import contract covers it, or a package that it lies in."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    (contract,) = [one for one in settings["contracts"] if one["name"].startswith("pure modules")]
    held = tuple(contract["source_modules"])
    claims = [name for name, module in modules.items() if CLAIM.search(house.module_docstring(module))]
    assert [name for name in claims if not f"{name}.".startswith(tuple(f"{one}." for one in held))] == []


LEAVES = (
    "chronicle.alerts", "chronicle.data", "chronicle.integrations", "chronicle.replay", "chronicle.rehearse",
    "chronicle.cli.mcp",
)  # fmt: skip


def test_commands_import_a_leaf_only_inside_the_verb_that_needs_it() -> None:
    """So the core verbs run where the leaves are not installed; what the core itself imports is an import contract."""
    found = []
    for path in sorted((ROOT / "chronicle" / "cli").glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            found += [f"{path.name}: {name}" for name in names if f"{name}.".startswith(tuple(f"{leaf}." for leaf in LEAVES))]
    assert found == []

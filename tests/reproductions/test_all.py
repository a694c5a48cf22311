"""Every public report of this folder happens without chronicle, and is answered with it.

A case that waits for something is expected to fail, strictly: the day it is answered, its `waits_for` must go.
"""

import ast
import importlib
import importlib.util
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

FILES = sorted(path.stem for path in Path(__file__).parent.glob("*_*.py"))
HELPERS = ("test_all", "hf_run", "ranks_run")  # `case` and `ranks` have no underscore
SAMPLE = ("accelerate_2665", "nanochat_muon", "pytorch_65342")
NAMES = [name for name in FILES if name not in HELPERS]


def load(name: str) -> Any:
    """The case of a file."""
    return importlib.import_module(f"tests.reproductions.{name}").CASE


def load_or_skip(name: str) -> Any:
    """The case; skipped where a library is missing that the tests do not require."""
    case = load(name)
    if case.needs and importlib.util.find_spec(case.needs) is None:
        pytest.skip(f"{case.needs} is not installed")
    return case


def waits_for(name: str) -> str:
    """Why a case does not hold yet, read from its source: collecting tests must not import every library."""
    source = ast.parse(Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8"))
    words = [key.value for key in ast.walk(source) if isinstance(key, ast.keyword) and key.arg == "waits_for"]
    return words[0].value if words and isinstance(words[0], ast.Constant) else ""


def marked(name: str, *, answered: bool) -> pytest.param:
    """A few run in `make test`, all in `make test-all`."""
    reason = waits_for(name)
    marks = [pytest.mark.slow, *([pytest.mark.sample] if name in SAMPLE else [])]
    if answered and reason:
        marks.append(pytest.mark.xfail(reason=reason, strict=True, raises=AssertionError))
    return pytest.param(name, marks=marks)


@pytest.mark.parametrize("name", [marked(name, answered=False) for name in NAMES])
def test_it_happens_without_chronicle(name: str, tmp_path: Path) -> None:
    """Otherwise the answer would be worth nothing. `bare` asserts what goes wrong, in its own source."""
    case = load_or_skip(name)
    assert "assert" in inspect.getsource(case.bare), "a case must say what goes wrong"
    case.bare(tmp_path)


@pytest.mark.parametrize("name", [marked(name, answered=True) for name in NAMES])
def test_chronicle_answers_it(name: str, tmp_path: Path) -> None:
    """What is said holds every pattern of the case."""
    case = load_or_skip(name)
    said = case.guarded(tmp_path)
    missing = [pattern for pattern in case.says if not re.search(pattern, said)]
    assert not missing, f"{missing} not in:\n{said[:2000]}"

"""The mutation benchmark finds the code that its list names, and tells a killed mutant from one that survived."""

from pathlib import Path

import pytest

from benchmarks.mutants import MUTANTS, ROOT, Mutant, find, judge


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.name}-{mutant.old[:30]}")
def test_every_mutant_names_code_and_tests_that_are_there(mutant: Mutant) -> None:
    """Code that moved is found again; code that changed needs a new mutant."""
    path, first, last = find(mutant, ROOT)
    assert path.read_text(encoding="utf-8")[first:last].split() == mutant.old.split()
    assert all((ROOT / name).is_file() for name in mutant.tests)


def test_verdicts_and_the_restored_file(tmp_path: Path) -> None:
    """In a package of one line: a mutant that a test sees, one that none sees, one whose code is not there."""
    code = tmp_path / "rollback" / "deep" / "sums.py"
    code.parent.mkdir(parents=True)
    code.write_text("def add(a, b):\n    return a + b\n")
    (tmp_path / "test_sums.py").write_text(
        "import sys\nsys.path.insert(0, 'rollback/deep')\nfrom sums import add\n\n\ndef test():\n    assert add(2, 3) == 5\n"
    )

    def verdict(name: str, old: str, new: str) -> str:
        return judge(Mutant(package="rollback", name=name, old=old, new=new, tests=("test_sums.py",)), tmp_path)

    assert verdict("add", "a + b", "a - b") == "killed"
    assert verdict("_add", "a  + b", "b + a") == "survived"
    assert verdict("add", "a * b", "a") == verdict("gone", "a + b", "a") == "stale (found 0 times)"
    assert verdict("add", "return", "retrun") == "error 2"  # code that does not compile proves nothing
    assert code.read_text() == "def add(a, b):\n    return a + b\n"

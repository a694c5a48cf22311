"""What is published: the wheel and the sdist that `python -m build` makes, and the wheel in an environment of its own."""

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOT_PUBLISHED = shutil.ignore_patterns(
    ".git", ".venv", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis", "demo", "build", "dist"
)

pytestmark = [pytest.mark.slow, pytest.mark.sample, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the wheel and the sdist, built from a copy of the sources as `python -m build` does it."""
    where = tmp_path_factory.mktemp("build")
    sources = where / "sources"
    shutil.copytree(ROOT, sources, ignore=NOT_PUBLISHED)
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", where / "dist", sources],
        check=True, capture_output=True, timeout=300, cwd=where,
    )  # fmt: skip
    return where / "dist"


def test_wheel_and_sdist_hold_the_product_and_nothing_else(built: Path) -> None:
    """Four packages, the module of the console script, the licence; no tests in the wheel."""
    wheel = next(built.glob("chronicle_ml-*.whl"))
    sdist = next(built.glob("chronicle_ml-*.tar.gz"))
    tops = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert tops == {"bit_transformer", "chronicle", "chronicle_ml.py", "experiments", "rollback"}
    names = zipfile.ZipFile(wheel).namelist()
    assert "rollback/py.typed" in names
    with tarfile.open(sdist) as archive:
        assert any(name.endswith("/pyproject.toml") for name in archive.getnames())


def test_the_wheel_works_in_an_environment_of_its_own(built: Path, tmp_path: Path) -> None:
    """Version, note and status by the installed console script, with the base dependencies and nothing else."""
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=False)
    install = [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python"), "install", "--quiet"]
    wheel = next(built.glob("*.whl"))
    done = subprocess.run([*install, str(wheel)], capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    keep = {name: value for name, value in os.environ.items() if not name.startswith(("CHRONICLE_", "PYTHONPATH"))}
    for words, said in (
        (("--version",), "chronicle "),
        (("init", "--run", "first"), ""),
        (("note", "installed from the wheel"), ""),
        (("status",), "first"),
    ):
        done = subprocess.run(
            [environment / "bin" / "chronicle", *words],
            cwd=tmp_path, env=keep, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{words}: {done.stderr}"
        assert said in done.stdout, f"{words}: {done.stdout}"

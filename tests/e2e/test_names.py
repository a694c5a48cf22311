"""A package or file of the user that takes the place of one of ours is named in one sentence, whichever way Python starts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONSOLE = "import sys; sys.argv[0] = 'chronicle'; from chronicle_ml import main; main()"  # what the console script does


def start(where: Path, *words: str, first: Path | None = None) -> "subprocess.CompletedProcess[str]":
    """Run an interpreter in a directory, ours on the path after what the test puts first."""
    path = os.pathsep.join([*([str(first)] if first else []), str(ROOT)])
    keep = {name: value for name, value in os.environ.items() if not name.startswith("CHRONICLE_")}
    return subprocess.run(
        [sys.executable, *words],
        cwd=where, env=keep | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def two_lines(found: Path, name: str) -> str:
    """The sentence and its hint."""
    return (
        f"error: another `{name}` would be imported: `{found}`, expected `{ROOT / name}`\n"
        f"hint: rename or move `{found}`, or start Python from another directory\n"
    )


@pytest.mark.parametrize(
    "words", [("script.py",), ("-m", "chronicle", "status"), ("-m", "bit_transformer.train"), ("-c", CONSOLE)]
)
def test_a_users_rollback_py_is_named_in_one_sentence(tmp_path: Path, words: tuple[str, ...]) -> None:
    """A script, `python -m` and the console script: both paths, the way out, code 1; the user's file is not run."""
    shadow = tmp_path / "rollback.py"
    shadow.write_text("print('the user file ran')\n", encoding="utf-8")
    (tmp_path / "script.py").write_text("import chronicle\nprint('went on')\n", encoding="utf-8")
    done = start(tmp_path, *words, first=tmp_path)
    assert (1, "", two_lines(shadow, "rollback")) == (done.returncode, done.stdout, done.stderr)


def test_a_script_may_catch_the_error(tmp_path: Path) -> None:
    """It is an ImportError, so that `try: import chronicle` works as people write it."""
    (tmp_path / "rollback.py").write_text("", encoding="utf-8")
    (tmp_path / "script.py").write_text(
        "try:\n    import chronicle\nexcept ImportError as problem:\n    print('without:', problem.name)\n", encoding="utf-8"
    )
    done = start(tmp_path, "script.py")
    assert (done.returncode, done.stdout) == (0, "without: rollback\n")


def test_a_users_experiments_directory_is_named_when_the_verb_needs_ours(tmp_path: Path) -> None:
    """`experiments/` beside a script is common: only `chronicle experiment` minds, and says so."""
    folder = tmp_path / "experiments"
    folder.mkdir()
    (folder / "__init__.py").write_text("print('the user package ran')\n", encoding="utf-8")
    done = start(tmp_path, "-m", "chronicle", "--version")
    assert (done.returncode, done.stderr) == (0, "")
    done = start(tmp_path, "-m", "chronicle", "experiment", "plan", "restart-impact")
    assert (1, "", two_lines(folder, "experiments")) == (done.returncode, done.stdout, done.stderr)


def test_a_strangers_chronicle_in_front_is_named(tmp_path: Path) -> None:
    """Another distribution's `chronicle` earlier on the path: the console script says how to get rid of it."""
    stranger = tmp_path / "site-packages" / "chronicle"
    stranger.mkdir(parents=True)
    (stranger / "__init__.py").write_text("", encoding="utf-8")
    done = start(tmp_path, "-c", CONSOLE, first=stranger.parent)
    assert done.returncode == 1
    assert done.stderr == (
        f"error: another `chronicle` would be imported: `{stranger}`, expected `{ROOT / 'chronicle'}`\n"
        "hint: pip uninstall chronicle; pip install --force-reinstall --no-deps chronicle-ml\n"
    )


def test_a_strangers_files_over_ours_are_named(tmp_path: Path) -> None:
    """Installed after ours into the same directory, a stranger's `chronicle/__init__.py` replaces ours."""
    place = tmp_path / "site-packages"
    (place / "chronicle").mkdir(parents=True)
    (place / "chronicle" / "__init__.py").write_text("", encoding="utf-8")
    (place / "chronicle_ml.py").write_bytes((ROOT / "chronicle_ml.py").read_bytes())
    done = start(tmp_path, "-c", CONSOLE, first=place)
    assert done.returncode == 1
    assert "another `chronicle` would be imported" in done.stderr
    assert str(place / "chronicle" / "__init__.py") in done.stderr
    assert "Traceback" not in done.stderr

"""`chronicle/launch/startup/sitecustomize.py`: what it does to any Python process under `chronicle run`."""

import json
import os
import subprocess
import sys
from pathlib import Path

from chronicle.launch.launchers import STARTUP_DIR, build_environment

ROOT = Path(__file__).parents[2]


def environment(inherited: dict[str, str]) -> dict[str, str]:
    return build_environment(inherited, {"CHRONICLE_RUN": "tr", "CHRONICLE_RUN_DIR": "/run"}, grace_seconds=30)


def python(code: str, *flags: str, **variables: str) -> str:
    """Standard output of `python -c code` in the environment that `chronicle run` gives."""
    plain = {key: value for key, value in os.environ.items() if not key.startswith("CHRONICLE_")}
    words = [sys.executable, *flags, "-c", code]
    done = subprocess.run(words, env=environment(plain | variables), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


WAITING = "import sys; print(any(type(one).__name__ == 'TrainerAwaited' for one in sys.meta_path))"


def test_directory_comes_first_once_and_leaves_the_users_path_as_it_is() -> None:
    assert environment({})["PYTHONPATH"] == str(STARTUP_DIR)  # an empty entry would be the working directory
    once = environment({"PYTHONPATH": f"/a{os.pathsep}/b"})
    assert once["PYTHONPATH"] == os.pathsep.join([str(STARTUP_DIR), "/a", "/b"])
    assert environment(once)["PYTHONPATH"] == once["PYTHONPATH"]  # `chronicle run` inside `chronicle run`


def test_guard_off_puts_nothing_before_the_users_path() -> None:
    assert "PYTHONPATH" not in environment({"CHRONICLE_GUARD": "off"})
    assert environment({"CHRONICLE_GUARD": "warn"})["PYTHONPATH"] == str(STARTUP_DIR)


def test_guard_off_inside_the_script_s_own_shell_ends_it() -> None:
    inherited = str(STARTUP_DIR)  # `CHRONICLE_GUARD=off python train.py` in a shell script under `chronicle run`
    assert python(WAITING, PYTHONPATH=inherited, CHRONICLE_GUARD="OFF") == "False\n"


def test_process_that_is_no_training_imports_nothing_more_and_keeps_its_path() -> None:
    tell = "import sys; names = sorted(sys.modules); import json; print(json.dumps(names)); print(sys.path[1:])"
    plain = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    without = subprocess.run([sys.executable, "-c", tell], env=plain, capture_output=True, text=True, check=True).stdout
    modules, path = python(tell, PYTHONPATH="").splitlines()
    expected, expected_path = without.splitlines()
    assert path == expected_path
    assert set(json.loads(modules)) - set(json.loads(expected)) <= {"sitecustomize", "json"}


def test_waits_for_the_trainer_alone() -> None:
    assert python(WAITING) == "True\n"
    assert python(WAITING, "-I") == "False\n"  # an isolated Python reads no PYTHONPATH: the limit that guard.md names


def test_users_own_sitecustomize_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.mine = 1", encoding="utf-8")
    told = "import sitecustomize; print(mine, sitecustomize.__file__)"
    assert python(told, PYTHONPATH=str(tmp_path)) == f"1 {tmp_path / 'sitecustomize.py'}\n"
    assert python(WAITING, PYTHONPATH=str(tmp_path)) == "True\n"


def test_error_in_the_users_own_sitecustomize_stays_the_users(tmp_path: Path) -> None:
    """Python reports it as without us and goes on."""
    (tmp_path / "sitecustomize.py").write_text("import a_module_that_is_missing", encoding="utf-8")
    variables = environment(dict(os.environ) | {"PYTHONPATH": str(tmp_path)})
    done = subprocess.run(
        [sys.executable, "-c", "print(1)"], env=variables, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "1\n")
    assert "a_module_that_is_missing" in done.stderr


def test_python_without_chronicle_says_so_once_and_trains(tmp_path: Path) -> None:
    """A launcher may start another environment than the one that `chronicle` is in."""
    package = tmp_path / "transformers"
    package.mkdir()
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "trainer.py").write_text("class Trainer:\n    def train(self, *a):\n        return a\n", encoding="utf-8")
    code = (
        "import sys; sys.modules['chronicle'] = None\n"
        "from transformers.trainer import Trainer\n"
        "print([Trainer().train(n) for n in (1, 2)])"
    )
    variables = environment(dict(os.environ) | {"PYTHONPATH": str(tmp_path)})
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "[(1,), (2,)]\n")
    assert done.stderr.count("this HF Trainer is not guarded") == 1

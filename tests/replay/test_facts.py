"""What a launch was made by: the files that it read before its first step, and which of them are others now."""

import json
import os
import subprocess
import sys
from pathlib import Path

from chronicle.launch.launchers import STARTUP_DIR
from chronicle.replay.facts import changed_facts, read_facts

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import json, sys
from pathlib import Path
from chronicle.replay.facts import write_facts
json.load(open("settings.json"))
Path("own.log").write_text("began")
Path("own.log").read_text()
Path(sys.argv[1], "state.json").read_text()
if Path("extra.txt").exists():
    Path("extra.txt").read_bytes()
write_facts(Path(sys.argv[2]), {})
Path("data.txt").read_text()
"""


def facts(directory: Path, launch: int) -> dict[str, object]:
    """The facts of one more launch of the script."""
    place = directory / "logs" / "run" / "launches" / f"{launch:04}"
    place.mkdir(parents=True)
    own = {"CHRONICLE_RUN_DIR": str(place.parent.parent), "CHRONICLE_LAUNCH_DIR": str(place),
           "CHRONICLE_CHECKPOINTS": str(directory / "checkpoints")}  # fmt: skip
    environ = {**os.environ, **own, "PYTHONPATH": f"{STARTUP_DIR}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", SCRIPT, str(directory / "checkpoints"), str(place)]
    subprocess.run(command, cwd=directory, env=environ, check=True, timeout=60)
    found = read_facts(place)
    assert found is not None
    return dict(found)


def test_a_file_that_the_launch_read_and_that_is_another_now_is_named(tmp_path: Path) -> None:
    """Not its own files, not a checkpoint's, not what is read after the first step; of what is gone, what lay beside it."""
    (tmp_path / "checkpoints").mkdir()
    for name in ("settings.json", "checkpoints/state.json", "data.txt"):
        (tmp_path / name).write_text(json.dumps(1))
    (tmp_path / "extra.txt").write_text("more")
    first = facts(tmp_path, 1)
    assert set(first["files"]) == {str(tmp_path / "settings.json"), str(tmp_path / "extra.txt")}  # type: ignore[call-overload]
    assert [item for item in changed_facts(first, facts(tmp_path, 2)) if item.kind == "file"] == []
    for name in ("settings.json", "checkpoints/state.json", "own.log", "data.txt"):
        (tmp_path / name).write_text(json.dumps(2))
    (tmp_path / "extra.txt").unlink()
    changed = [item.words for item in changed_facts(first, facts(tmp_path, 3)) if item.kind == "file"]
    extra, settings = (f"`{tmp_path / name}`, which the launch read," for name in ("extra.txt", "settings.json"))
    assert changed == [f"{extra} is gone", f"{settings} has changed"]


def test_noting_never_ends_an_open(tmp_path: Path) -> None:
    """A directory that is gone has no absolute path, and what an audit hook raises would end the script's own `open`."""
    (tmp_path / "settings.json").write_text("1")
    script = """
import os, sys
directory = os.open(sys.argv[1], os.O_RDONLY)
os.mkdir("gone")
os.chdir("gone")
os.rmdir(os.getcwd())
os.close(os.open("settings.json", os.O_RDONLY, dir_fd=directory))
"""
    own = {"CHRONICLE_RUN_DIR": str(tmp_path), "CHRONICLE_LAUNCH_DIR": str(tmp_path), "PYTHONPATH": str(STARTUP_DIR)}
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=tmp_path, env={**os.environ, **own},
                          capture_output=True, text=True, timeout=60, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr

"""What a launch was made by: the files that it is known to depend on, and which of them are others now."""

import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from chronicle.launch.launchers import STARTUP_DIR
from chronicle.prints.launch_facts import (
    ChangedFact,
    changed_facts,
    holds_data,
    is_outside,
    read_facts,
    write_facts,
)

ROOT = Path(__file__).resolve().parents[2]
LATE = """
import os, sys
from pathlib import Path
from chronicle.prints.launch_facts import add_sources, write_facts
place = Path(os.environ["CHRONICLE_LAUNCH_DIR"])
write_facts(place, {})
if "late" in sys.argv:
    sys.path.insert(0, "")
    import late
    add_sources(place)
"""
SCRIPT = """
import os, sys
os.environ["MADE_HERE"] = str(os.getpid())  # as libraries do, of a directory of this process
from pathlib import Path
from chronicle.prints.launch_facts import write_facts
Path("own.json").write_text(str(os.getpid()))
write_facts(Path(os.environ["CHRONICLE_LAUNCH_DIR"]), {})
"""


def facts(directory: Path, launch: int, *words: str, script: str = SCRIPT) -> dict[str, object]:
    """The facts of one more launch of the script."""
    place = directory / "logs" / "run" / "launches" / f"{launch:04}"
    place.mkdir(parents=True)
    own = {"CHRONICLE_RUN_DIR": str(place.parent.parent), "CHRONICLE_LAUNCH_DIR": str(place),
           "CHRONICLE_CHECKPOINTS": str(directory / "checkpoints")}  # fmt: skip
    environ = {**os.environ, **own, "PYTHONPATH": f"{STARTUP_DIR}{os.pathsep}{ROOT}"}
    subprocess.run([sys.executable, "-c", script, *words], cwd=directory, env=environ, check=True, timeout=60)
    found = read_facts(place)
    assert found is not None
    return dict(found)


def told(before: dict[str, object], after: dict[str, object], ended: float | None) -> list[tuple[str, str]]:
    return [(item.kind, item.words) for item in changed_facts(before, after, ended)]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A working directory with settings, data and a checkpoint, all older than a launch."""
    for name in ("checkpoints", "conf", ".cache"):
        (tmp_path / name).mkdir()
    for name in ("settings.json", "conf/model.yaml", "checkpoints/state.json", "data.bin", ".cache/a.json", "notes.txt"):
        (tmp_path / name).write_text("1")
    time.sleep(0.05)
    return tmp_path


def test_a_source_that_is_imported_after_the_first_step_is_known_and_compared_as_it_lies(directory: Path) -> None:
    late = directory / "late.py"
    late.write_text("A = 1")
    before = facts(directory, 1, "late", script=LATE)
    assert str(late) in before["code"]  # type: ignore[operator]
    after = facts(directory, 2, script=LATE)
    assert told(before, after, None) == []
    late.write_text("A = 2")
    assert told(before, after, None) == [("code", f"`{late}` has changed")]
    late.unlink()
    assert told(before, after, None) == [("code", f"`{late}` is gone")]


def test_files_are_settings_here_and_what_the_command_names(directory: Path) -> None:
    """Not its own files, not a checkpoint's, no hidden ones, and nothing that the process wrote itself."""
    assert is_outside(str(ROOT / "chronicle_ml.py"), ())  # ours, also where Python reads its source
    found = facts(directory, 1, "--data=data.bin", "notes.txt", "--lr", "0.1")
    assert set(found["files"]) == {  # type: ignore[call-overload]
        str(directory / name) for name in ("settings.json", "conf/model.yaml", "data.bin", "notes.txt")
    }


def test_a_file_that_was_changed_after_the_launch_is_named(directory: Path) -> None:
    first = facts(directory, 1, "data.bin")
    ended = time.time()
    time.sleep(0.05)
    assert told(first, facts(directory, 2, "data.bin"), ended) == []
    (directory / "settings.json").write_text("2")
    (directory / "data.bin").write_text("2")
    (directory / "conf/model.yaml").unlink()
    settings, data, model = (directory / name for name in ("settings.json", "data.bin", "conf/model.yaml"))
    time.sleep(0.05)
    after = facts(directory, 3, "data.bin")
    words = [("file", f"`{model}` is gone"), ("file", f"`{data}` has changed"), ("file", f"`{settings}` has changed")]
    assert told(first, after, ended) == words
    assert [kind for kind, _ in told(first, after, time.time())] == ["file", "doubt", "doubt"], "the launch may have written it"
    assert [kind for kind, _ in told(first, after, None)] == ["file", "doubt", "doubt"], "nobody knows when it ended"


def test_a_large_file_is_known_by_its_size_and_blocks(directory: Path) -> None:
    large = directory / "large.bin"
    large.write_bytes(bytes(5 << 20))
    first = facts(directory, 1, "large.bin")
    ended = time.time()
    time.sleep(0.05)
    os.utime(large, (1, 1))
    assert told(first, facts(directory, 2, "large.bin"), ended) == [("doubt", f"`{large}` has changed")]
    large.write_bytes(bytes(2 << 20) + b"1" * (3 << 20))
    time.sleep(0.05)
    assert told(first, facts(directory, 3, "large.bin"), ended) == [("file", f"`{large}` has changed")]


def test_files_that_are_mapped_are_among_those_of_a_launch(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(bytes(8192))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
        place = tmp_path / "logs" / "run" / "launches" / "0001"
        place.mkdir(parents=True)
        write_facts(place, {})
    found = read_facts(place)
    assert found is not None and str(path) in found["files"]
    assert not any(name.endswith(".so") for name in found["files"])


def test_a_file_holds_data_where_it_is_none_of_settings(tmp_path: Path) -> None:
    (tmp_path / "boxes.json").write_text("1" * 70_000)
    names = {"table.csv": True, "masks.npy": True, "run.yaml": False, "recipe.json": False, "boxes.json": True,
             "more.py": False}  # fmt: skip
    for name, holds in names.items():
        assert holds_data(ChangedFact("file", str(tmp_path / name), "1", "2")) is holds, name
    assert not holds_data(ChangedFact("code", str(tmp_path / "table.csv"), "1", "2"))


def test_a_source_that_came_after_the_launch_and_is_imported_is_new(tmp_path: Path) -> None:
    """It hides a package, which is still where it was; what only a resume imports is older."""
    (tmp_path / "dice.py").write_text("")
    before, after = {"code": {"/libs/dice/__init__.py": "1"}}, {"code": {str(tmp_path / "dice.py"): "2"}}
    now = time.time()
    found = [one.words for one in changed_facts(before, after, now - 9)]
    assert found == ["`/libs/dice/__init__.py` is gone", f"`{tmp_path / 'dice.py'}` is new"]
    for ended in (now + 9, None):
        assert [one.name for one in changed_facts(before, after, ended)] == ["/libs/dice/__init__.py"]


def test_another_version_of_chronicle_is_no_cause() -> None:
    before, after = ({"packages": {"chronicle": version, "torch": "2"}} for version in ("0.1", "0.2"))
    assert told(before, after, None) == [("recorder", "chronicle: 0.1 → 0.2")]  # type: ignore[arg-type]

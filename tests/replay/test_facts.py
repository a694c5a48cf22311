"""What a launch was made by: the files that it read before its first step, and which of them are others now."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from chronicle.launch.launchers import STARTUP_DIR
from chronicle.resume.launch_facts import (
    ITS_OWN,
    ChangedFact,
    LateFiles,
    changed_facts,
    holds_data,
    is_outside,
    new_files,
    new_sources,
    read_facts,
    write_facts,
)

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import json, os, subprocess, sys
os.environ["MADE_HERE"] = str(os.getpid())  # as libraries do, of a directory of this process
from pathlib import Path
from typing import Any
from chronicle.resume.launch_facts import LateFiles, write_facts
json.load(open("settings.json"))
exec(open("more.py").read()) if Path("more.py").exists() else None
Path("own.log").write_text("began")
Path("own.log").read_text()
Path(sys.argv[1], "state.json").read_text()
if Path("extra.txt").exists():
    Path("extra.txt").read_bytes()
late = LateFiles(Path(sys.argv[2]), write_facts(Path(sys.argv[2]), {}))
late.stepping(1)
for step in range(2, 6):
    json.load(open("live.json"))
    if step == 2:
        Path("live.json").write_text("[]") if "mine" in sys.argv else subprocess.run(["touch", "live.json"])
    if step == 3 and Path("edit").exists():
        subprocess.run(["sh", "-c", "echo 7 > live.json"])
    if step == 4 and Path("note.txt").exists():
        Path("note.txt").read_text()
        os.remove("note.txt")
    if step == 4 and Path("large.bin").exists():
        Path("large.bin").read_bytes()
    late.stepping(step)
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
    """Not its own files, not a checkpoint's; of what is gone, what lay beside it."""
    (tmp_path / "checkpoints").mkdir()
    for name in ("settings.json", "checkpoints/state.json", "live.json"):
        (tmp_path / name).write_text(json.dumps(1))
    (tmp_path / "extra.txt").write_text("more")
    assert is_outside(str(ROOT / "chronicle_ml.py"), ())  # ours, also where Python reads its source
    first = facts(tmp_path, 1)
    assert set(first["files"]) == {str(tmp_path / "settings.json"), str(tmp_path / "extra.txt")}  # type: ignore[call-overload]
    assert [item for item in changed_facts(first, facts(tmp_path, 2)) if item.kind == "file"] == []
    for name in ("settings.json", "checkpoints/state.json", "own.log"):
        (tmp_path / name).write_text(json.dumps(2))
    (tmp_path / "extra.txt").unlink()
    changed = [item.words for item in changed_facts(first, facts(tmp_path, 3)) if item.kind == "file"]
    extra, settings = (f"`{tmp_path / name}`, which the launch read," for name in ("extra.txt", "settings.json"))
    assert changed == [f"{extra} is gone", f"{settings} has changed"]


def test_a_file_that_came_after_the_launch_and_is_read_is_named(tmp_path: Path) -> None:
    """A local setting. What was there already, and only a later launch reads, is not said to be new."""
    (tmp_path / "checkpoints").mkdir()
    for name in ("settings.json", "checkpoints/state.json", "live.json"):
        (tmp_path / name).write_text("1")
    (tmp_path / "older.txt").write_text("older")
    first, ended = facts(tmp_path, 1), time.time()
    time.sleep(0.05)
    (tmp_path / "extra.txt").write_text("local")
    (tmp_path / "more.py").write_text("open('older.txt').read()")
    after = facts(tmp_path, 2)
    made = [tmp_path / "extra.txt", tmp_path / "more.py"]
    told = [f"`{path}` came after the launch, and is read" for path in made]
    assert [item.words for item in new_files(first, after, 9, ended)] == told
    assert new_files(first, after, 9, None) == new_files(after, after, 9, ended) == []
    assert new_files(first, after, 9, time.time()) == []


def test_what_is_read_after_the_first_step_is_noted_too(tmp_path: Path) -> None:
    """A file that is read first at step 2, one that changes while the launch runs, one that comes and goes, a large one."""
    (tmp_path / "settings.json").write_text("1")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/state.json").write_text("1")
    live, note, large = (tmp_path / name for name in ("live.json", "note.txt", "large.bin"))

    def told(before: dict[str, object], after: dict[str, object], until: int | None = None) -> list[tuple[str, str]]:
        return [(item.kind, item.words) for item in changed_facts(before, after, until)]

    live.write_text("1")
    (tmp_path / "more.py").write_text("more = 1")
    large.write_bytes(bytes(5 << 20))
    first = facts(tmp_path, 1)
    assert told(first, facts(tmp_path, 2)) == []  # touched at step 2, and the same; its own variable is another
    live.write_text("2")
    (tmp_path / "more.py").write_text("more = 2")  # run by `exec`
    second = facts(tmp_path, 3)
    read = [f"`{path}`, which the launch read, has changed" for path in (tmp_path / "more.py", live)]
    assert told(first, second) == [("file", words) for words in read]
    assert told(first, second, until=0) == [("file", read[0])]  # the other was read first by the begin of step 2
    assert told(first, second, until=1) == [("file", read[0]), ("doubt", f"`{live}` was written anew")]  # within step 1, or 2
    os.utime(large, (1, 1))
    assert told(second, facts(tmp_path, 4)) == [("doubt", f"`{large}` was written anew")]
    large.write_bytes(bytes(2 << 20) + b"1" * (3 << 20))
    assert told(second, facts(tmp_path, 5)) == [("file", f"`{large}`, which the launch read, has changed")]
    (tmp_path / "edit").touch()
    note.touch()
    third = facts(tmp_path, 6)
    (tmp_path / "edit").unlink()
    assert told(third, facts(tmp_path, 7)) == [
        ("file", f"`{live}`, which the launch read, changed while it ran, about step 3"),
        ("doubt", f"`{note}`: opened at step 4, and not in the replay"),
    ]


def test_what_a_launch_reads_and_writes_anew_is_known_as_it_was_read(tmp_path: Path) -> None:
    """A counter of launches: the next one reads another number."""
    (tmp_path / "checkpoints").mkdir()
    for name in ("settings.json", "checkpoints/state.json", "live.json"):
        (tmp_path / name).write_text("1")
    (tmp_path / "more.py").write_text("n = int(open('n.txt').read())\nopen('n.txt', 'w').write(str(n + 1))")
    (tmp_path / "n.txt").write_text("1")
    first, second = facts(tmp_path, 1), facts(tmp_path, 2)
    assert str(tmp_path / "n.txt") in first["files"]  # type: ignore[operator]
    (told,) = changed_facts(first, second)
    assert told.words == f"`{tmp_path / 'n.txt'}`, which the launch read, has changed"
    names = ["checkpoints", "live.json", "logs", "more.py", "n.txt", "settings.json"]
    assert first["around"]["names"] == names  # type: ignore[index]


def test_what_a_launch_wrote_and_left_is_no_doubt_where_a_replay_begins_later(tmp_path: Path) -> None:
    sample = tmp_path / "sample-10.npy"
    sample.write_text("1")
    before = {"directory": str(tmp_path), "later": [[str(sample), 11, ITS_OWN]]}
    assert changed_facts(before, {}) == []
    sample.unlink()
    assert [item.kind for item in changed_facts(before, {})] == ["doubt"]


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


def test_a_file_that_changes_at_every_step_is_noted_for_a_while_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of a million steps keeps a small file, and says from which step on it does not know."""
    place = tmp_path / "logs" / "run" / "launches" / "0001"
    place.mkdir(parents=True)
    monkeypatch.setattr(sys, "_chronicle_opened", {}, raising=False)
    late, beat = LateFiles(place, write_facts(place, {})), tmp_path / "beat.txt"
    for step in range(1, 400):
        beat.write_text(str(step))
        if (opened := getattr(sys, "_chronicle_opened", None)) is not None:
            opened[str(beat)] = False
        late.stepping(step)
    found = read_facts(place)
    assert found is not None and len(found["later"]) == found["unnoted"] == 256
    assert any(item.kind == "doubt" and "from step 256 on" in item.words for item in changed_facts(found, found))


def test_data_that_is_read_file_by_file_leaves_room_for_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures older than the process are known by their age; files that came meanwhile are counted, up to a limit."""
    place = tmp_path / "logs" / "run" / "launches" / "0001"
    place.mkdir(parents=True)
    monkeypatch.setattr(sys, "_chronicle_opened", {}, raising=False)
    monkeypatch.setattr(sys, "_chronicle_began", time.time() + 9, raising=False)
    late = LateFiles(place, write_facts(place, {}))

    def read(step: int, count: int, name: str) -> dict[str, object]:
        for number in range(count):
            path = tmp_path / f"{name}-{number}.npy"
            path.write_text(name)
            if (opened := getattr(sys, "_chronicle_opened", None)) is not None:
                opened[str(path)] = False
        late.stepping(step)
        return dict(read_facts(place) or {})

    found = read(1, 200, "old")
    assert "unnoted" not in found and 60 < len(list(found["later"])) < 70  # type: ignore[call-overload]
    late._began = 1.0
    assert "unnoted" not in read(2, 10, "new")
    assert read(3, 100, "newer")["unnoted"] == 3
    (tmp_path / "pictures").mkdir()  # a directory that was opened is none of its files
    before = {"directory": str(tmp_path), "later": [[str(tmp_path / "pictures"), 1, ""], [str(tmp_path / "gone"), 1, ""]]}
    assert [item.name for item in changed_facts(before, {})] == [str(tmp_path / "gone")]


def test_what_the_system_gives_is_a_doubt_where_it_is_another_and_unknown_in_old_records() -> None:
    before, after = ({"machine": {"limits": limits, "time zone": "UTC"}} for limits in ("nofile 1024", "nofile 960"))
    (told,) = changed_facts(before, after)
    assert (told.kind, told.words) == ("doubt", "limits: nofile 1024 → nofile 960")
    assert changed_facts({}, after) == []
    assert changed_facts({"arithmetic": {"threads": "1"}}, {"arithmetic": {"threads": "1", "processor": "A"}}) == []


def test_more_files_in_one_step_than_are_noted_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chronicle.resume.launch_facts.MOST_OPENED", 2)
    (tmp_path / "settings.txt").write_text("1")
    place = tmp_path / "logs" / "run" / "launches" / "0001"
    place.mkdir(parents=True)
    found: dict[str, Any] = {"files": {}}
    monkeypatch.setattr(sys, "_chronicle_opened", None, raising=False)
    late = LateFiles(place, found)
    for step, num in ((2, 1), (3, 2)):
        late.opened |= {str(tmp_path / f"{step}-{one}.txt"): False for one in range(num)}
        late.stepping(step)
    assert found["unnoted"] == 3


def test_a_name_in_the_search_path_is_no_file() -> None:
    """An editable package puts one there; an import looks for it in the working directory."""
    before = {"directory": "/work", "later": [["/work/__editable__.mine-1.0.finder.__path_hook__", 3, ""]]}
    assert changed_facts(before, {"later": []}) == []


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
    assert [one.words for one in new_sources(before, after, now - 9)] == [f"`{tmp_path / 'dice.py'}` is new"]
    assert new_sources(before, after, now + 9) == new_sources(before, after, None) == []


def test_files_that_are_mapped_are_among_those_that_a_launch_read(tmp_path: Path) -> None:
    import mmap

    path = tmp_path / "weights.bin"
    path.write_bytes(bytes(8192))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
        place = tmp_path / "logs" / "run" / "launches" / "0001"
        place.mkdir(parents=True)
        write_facts(place, {})
    found = read_facts(place)
    assert found is not None and str(path) in found["files"]
    assert not any(name.endswith(".so") for name in found["files"])


def test_another_version_of_chronicle_is_no_cause(tmp_path: Path) -> None:
    before, after = ({"packages": {"chronicle": version, "torch": "2"}} for version in ("0.1", "0.2"))
    (found,) = changed_facts(before, after)
    assert (found.kind, found.words) == ("recorder", "chronicle: 0.1 → 0.2")

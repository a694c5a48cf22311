"""The first save of a real launch is loaded in a second process beside it: what it cannot be resumed from is known at once."""

import subprocess
import sys
from pathlib import Path

import pytest

from chronicle.journal import JournalWriter, read_journal
from chronicle.journal.events import Rehearsed, events_of, filled_with
from chronicle.paths import RunPaths
from chronicle.rehearse import first_save
from chronicle.rehearse.launches import Place
from rollback.checkpoint.listing import list_checkpoints
from tests.rehearse.test_rehearse import CHRONICLE, SCRIPT

SLOW = SCRIPT.replace("    position += 1", "    position += 1; time.sleep(0.7)")
TEMPLATE = (sys.executable, "train.py", "{out}", "{name}")


def launch(place: Path, lose: str) -> tuple[str, list[Rehearsed]]:
    """A launch that was rehearsed before, with `[rehearse] first_save`; what it said, and what its journal says."""
    (place / "train.py").write_text(SLOW.replace("sys.argv[2]", repr(lose)))
    (place / "chronicle.toml").write_text("[rehearse]\nfirst_save = true\n")
    (place / "saved").mkdir()
    paths = RunPaths(place / "logs" / "r")
    with JournalWriter(paths) as writer:
        writer.write(Rehearsed(verdict="resumes exactly", command=TEMPLATE, resume=TEMPLATE, signal="SIGKILL"), title="x")
    words = [*CHRONICLE, "run", "--run", "r", "--checkpoints", "saved", "--", sys.executable, "train.py", "saved", "one"]
    done = subprocess.run(words, cwd=place, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    entries = read_journal(paths).entries
    return done.stderr, [event for entry, event in events_of(entries, Rehearsed) if entry.launch is not None]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lose", "verdict"), [("nothing", "resumes from its first save"), ("resume", "does not resume exactly")]
)
def test_the_first_save_is_loaded_beside_the_launch(tmp_path: Path, lose: str, verdict: str) -> None:
    said, events = launch(tmp_path, lose)
    assert [(event.verdict, event.at, event.to) for event in events] == [(verdict, 10, 11)], said
    assert f"first save (step 10): the script {verdict}" in said
    assert len(list_checkpoints(tmp_path / "saved")) == 3
    assert not (tmp_path / "logs" / "r" / "rehearsal" / "first_save").exists()
    words = [*CHRONICLE, "status", "--run", "r"]
    status = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert "first save" in status and verdict in " ".join(status.split())


def test_nothing_is_started_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "step-10.pt").write_bytes(b"x")
    (saved,) = list(first_save.saved_in(tmp_path).values())
    monkeypatch.setattr(first_save, "read_host_memory", lambda: {"memory_fraction": 0.7})
    assert first_save.room_for(saved, tmp_path)[0] == "no room for a second process: less than half of the memory is free"
    monkeypatch.setattr(first_save, "read_host_memory", lambda: {"memory_fraction": 0.1})
    monkeypatch.setattr(first_save.shutil, "which", lambda name: None)
    why, environ = first_save.room_for(saved, tmp_path)
    assert why == "" and environ["PET_MASTER_PORT"].isdecimal(), "the port of the launch is in use"


def test_where_the_real_command_writes_is_known_from_the_rehearsed_one(tmp_path: Path) -> None:
    assert filled_with("--output_dir={out}/x", "--output_dir=/data/run/x") == {"out": "/data/run"}
    assert filled_with("train.py", "train.py") == {} and filled_with("train.py", "other.py") is None
    assert Place(name="first", scratch=tmp_path).fill(TEMPLATE)[2] == str(tmp_path / "first" / "out")

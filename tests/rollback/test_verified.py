"""What `chronicle verify` found is remembered in the journal, holds until a file changes, and is what others go by."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from chronicle.cli.main import run
from chronicle.journal import JournalWriter, read_journal
from chronicle.paths import RunPaths
from rollback.checkpoint.layout import stamp_of
from tests.rollback.command_line import chronicle, places
from tests.rollback.disks import picture

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@pytest.fixture
def top(pristine: Path, tmp_path: Path) -> Path:
    """A run whose launch 1 saved steps 10, 15 and 20."""
    subprocess.run(["cp", "-a", str(pristine / "checkpoints"), str(tmp_path)], check=True)
    writer = JournalWriter(RunPaths(tmp_path / "logs" / "r"))
    writer.append("launch.start", launch=1, data={"start_step": 0})
    for step in (10, 15, 20):
        path = tmp_path / "checkpoints" / f"opt_step-{step}" / "accelerator_state"
        writer.append("checkpoint", step=step, launch=1, data={"path": str(path)})
    writer.append("launch.end", launch=1, data={"exit_code": 0, "last_step": 20})
    writer.close()
    return tmp_path


def verdicts(top: Path) -> list[tuple[int | None, int | None, bool, bool]]:
    entries = read_journal(RunPaths(top / "logs" / "r")).of_kind("verified")
    return [(e.step, e.launch, e.data["full"], e.data["passes"]) for e in entries]


def flip_bit(path: Path) -> None:
    """In a tensor's bytes, size and time as they were: what a bad disk does."""
    times = path.stat()
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        tensor = next(record for record in archive.infolist() if record.filename.endswith("/data/0"))
    name_length, more_length = struct.unpack_from("<HH", content, tensor.header_offset + 26)
    content[tensor.header_offset + 30 + name_length + more_length] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_verify_is_journalled_and_status_says_so(top: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert chronicle(top, "status") == 0
    assert "not verified" in capsys.readouterr().out
    assert chronicle(top, "verify", "20") == 0
    assert verdicts(top) == [(20, 1, True, True)]
    chronicle(top, "status")
    assert "every byte read" in capsys.readouterr().out
    chronicle(top, "status", "--json")
    assert json.loads(capsys.readouterr().out)["checkpoint"]["verified"]["full"] is True


def test_a_repetition_adds_nothing_and_a_deeper_look_does(top: Path) -> None:
    assert chronicle(top, "verify", "--all", "--quick") == 0
    assert verdicts(top) == [(step, 1, False, True) for step in (10, 15, 20)]
    assert chronicle(top, "verify", "15") == 0
    assert chronicle(top, "verify", "--all", "--quick") == 0
    assert chronicle(top, "verify", str(top / "checkpoints" / "opt_step-15" / "accelerator_state")) == 0
    assert verdicts(top)[3:] == [(15, 1, True, True)]


def test_a_changed_file_ends_the_verdict(top: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chronicle(top, "verify", "20")
    state = top / "checkpoints" / "opt_step-20" / "accelerator_state" / "optimizer.bin"
    os.utime(state)
    capsys.readouterr()
    chronicle(top, "status")
    assert "not verified; check it: `chronicle verify 20`" in capsys.readouterr().out


@pytest.mark.parametrize("change", ["touched", "longer", "another inode", "one more", "one less"])
def test_stamp_changes_with_every_file_and_not_with_the_place(top: Path, change: str) -> None:
    checkpoint = top / "checkpoints" / "opt_step-20"
    state = checkpoint / "accelerator_state" / "optimizer.bin"
    before = stamp_of(checkpoint)
    assert stamp_of(checkpoint / "accelerator_state") == before
    shutil.move(checkpoint, top / "elsewhere")
    assert stamp_of(top / "elsewhere") == before
    shutil.move(top / "elsewhere", checkpoint)
    if change == "touched":
        os.utime(state)
    elif change == "longer":
        times = state.stat()
        state.write_bytes(state.read_bytes() + b"\0")
        os.utime(state, ns=(times.st_atime_ns, times.st_mtime_ns))
    elif change == "another inode":
        shutil.copy2(state, top / "copy")
        os.replace(top / "copy", state)
    elif change == "one more":
        (checkpoint / "notes.md").touch()
    else:
        state.unlink()
    assert stamp_of(checkpoint) != before


def test_rollback_reads_every_byte_unless_a_verdict_holds(top: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*words: str) -> str:
        capsys.readouterr()
        assert chronicle(top, "rollback", "--to", "10", "--dry-run", *words) == 0
        return next(line for line in capsys.readouterr().out.splitlines() if "verified:" in line)

    assert "every byte was read now" in said()
    assert "names, structure and counters only" in said("--verify", "quick")
    chronicle(top, "verify", "10", "--quick")
    assert "every byte was read now" in said()
    chronicle(top, "verify", "10")
    assert "no file has changed since" in said()
    os.utime(top / "checkpoints" / "opt_step-10" / "accelerator_state" / "optimizer.bin")
    assert "every byte was read now" in said()


def test_flipped_bit_stops_a_rollback_that_nobody_told_to_look_closely(
    top: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip_bit(top / "checkpoints" / "opt_step-10" / "accelerator_state" / "optimizer.bin")
    before = picture(top / "checkpoints")
    assert chronicle(top, "rollback", "--to", "10", "--yes") == 3
    assert "optimizer.bin" in capsys.readouterr().err
    assert picture(top / "checkpoints") == before


def test_what_was_found_unsound_stays_refused_without_reading_again(
    top: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip_bit(top / "checkpoints" / "opt_step-10" / "accelerator_state" / "optimizer.bin")
    assert chronicle(top, "verify", "10") == 5
    assert verdicts(top) == [(10, 1, True, False)]
    capsys.readouterr()
    assert chronicle(top, "rollback", "--to", "10", "--yes", "--verify", "quick") == 3
    assert "found by `chronicle verify`" in capsys.readouterr().err


def test_damage_that_came_later_is_a_new_verdict(top: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A bad disk changes neither size nor time: only reading again finds it, and then it counts."""
    chronicle(top, "verify", "20")
    flip_bit(top / "checkpoints" / "opt_step-20" / "accelerator_state" / "optimizer.bin")
    assert chronicle(top, "verify", "20") == 5
    assert verdicts(top) == [(20, 1, True, True), (20, 1, True, False)]
    capsys.readouterr()
    chronicle(top, "status")
    assert "found unsound" in capsys.readouterr().out


def test_verdict_follows_a_checkpoint_to_the_abandoned_and_back(top: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chronicle(top, "verify", "20")
    assert chronicle(top, "rollback", "--to", "10", "--yes") == 0
    capsys.readouterr()
    assert chronicle(top, "rollback", "--to", "20", "--dry-run") == 0
    assert "no file has changed since" in capsys.readouterr().out
    chronicle(top, "undo", "--yes")
    capsys.readouterr()
    chronicle(top, "status")
    assert "every byte read" in capsys.readouterr().out


def test_outside_the_run_nothing_is_written(top: Path, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere" / "opt_step-10"
    shutil.copytree(top / "checkpoints" / "opt_step-10", other)
    entries = len(read_journal(RunPaths(top / "logs" / "r")).entries)
    assert chronicle(top, "verify", str(other)) == 0
    assert len(read_journal(RunPaths(top / "logs" / "r")).entries) == entries
    assert run(["verify", "10", "--run", "unknown", *places(top)[2:]]) == 0
    assert not (top / "logs" / "unknown").exists()


def test_journal_that_cannot_be_written_is_said_and_changes_no_verdict(
    top: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert chronicle(top, "verify", "20") == 0
    said = capsys.readouterr()
    assert "intact" in said.out and "not recorded" in said.err


def test_proposal_and_prune_go_by_what_was_found(top: Path) -> None:
    from chronicle.watch.advice import collect_candidates

    chronicle(top, "verify", "--all")
    flip_bit(top / "checkpoints" / "opt_step-15" / "accelerator_state" / "optimizer.bin")
    chronicle(top, "verify", "15")
    entries = read_journal(RunPaths(top / "logs" / "r")).entries
    found = collect_candidates([top / "checkpoints"], before=20, entries=entries)
    assert {c.step: c.verified for c in found} == {10: True, 15: False, 20: True}


# ---- chronicle latest ----------------------------------------------------------------------------------------------------


def test_latest_is_the_newest_that_is_whole(top: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert chronicle(top, "latest", "--print-path") == 0
    assert capsys.readouterr() == (f"{top / 'checkpoints' / 'opt_step-20'}\n", "")
    (top / "checkpoints" / "opt_step-20" / "accelerator_state" / "optimizer.bin").unlink()
    assert chronicle(top, "latest", "--print-path") == 0
    shown = capsys.readouterr()
    assert shown.out == f"{top / 'checkpoints' / 'opt_step-15'}\n"
    assert "passed over: step 20 (launch 1) opt_step-20" in shown.err and "optimizer.bin" in shown.err


def test_latest_verified_reads_every_byte_once(top: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The quick look does not see the flipped bit. What was read is recorded, and not read again."""
    flip_bit(top / "checkpoints" / "opt_step-20" / "accelerator_state" / "optimizer.bin")
    assert chronicle(top, "latest", "--json") == 0
    assert json.loads(capsys.readouterr().out)["step"] == 20
    for _ in range(2):
        assert chronicle(top, "latest", "--verified", "--json") == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["step"], found["every_byte_read"]) == (15, True)
        assert [one["step"] for one in found["passed_over"]] == [20] and "optimizer.bin" in found["passed_over"][0]["reason"]
        assert verdicts(top) == [(20, 1, True, False), (15, 1, True, True)]
    assert chronicle(top, "latest", "--json") == 0  # the recorded verdict counts for the quick question too
    assert json.loads(capsys.readouterr().out)["step"] == 15
    assert chronicle(top, "status") == 0
    assert "newest verified: step 15" in capsys.readouterr().out


def test_latest_leaves_out_side_tries_by_who_saved_them(top: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Launch 2 tried from step 10 to 20 and saved 18; launch 3 went on from 15 of launch 1. Numbers alone say 18 or 20."""
    shutil.move(top / "checkpoints" / "opt_step-20", top / "checkpoints" / "opt_step-18")
    writer = JournalWriter(RunPaths(top / "logs" / "r"))
    for launch, start, last in ((2, 10, 20), (3, 15, 17)):
        writer.append("launch.start", launch=launch, data={"start_step": start})
        source = {"launch": 1, "step": start}
        writer.append("guard.verdict", step=start, launch=launch, data={"verdict": "passed", "loaded": source})
        if launch == 2:
            path = top / "checkpoints" / "opt_step-18" / "accelerator_state"
            writer.append("checkpoint", step=18, launch=2, data={"path": str(path)})
        writer.append("launch.end", launch=launch, data={"exit_code": 0, "last_step": last})
    writer.close()
    assert chronicle(top, "latest") == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("step 15 (launch 1) opt_step-15 · whole (names")
    assert "passed over: step 18 (launch 2) opt_step-18: launch 2 saved it, and the run is at step 17 of launch 3" in shown.err


def test_no_latest_is_said_with_what_was_passed_over(top: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (top / "checkpoints").rglob("optimizer.bin"):
        path.write_bytes(b"")
    assert chronicle(top, "latest", "--print-path") == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "no checkpoint that is whole" in shown.err and "passed over: step 20" in shown.err

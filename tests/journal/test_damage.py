"""Damaged journals: `audit` and `status` say every damage, and no command decides on one without a reason."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from chronicle.errors import JournalError, Refusal
from chronicle.journal import JournalWriter, read_journal
from chronicle.journal.reader import find_damage
from chronicle.launch.admission import ensure_startable
from chronicle.metrics import MetricsWriter
from chronicle.paths import RunPaths
from chronicle.watch.autopilot import run_autopilot
from tests.builders.story_runs import toy_run
from tests.commands.cli import Cli
from tests.rollback.conftest import pristine

__all__ = ["pristine"]

# --- the journal: four writers, of which the first three are recorded by later ones -------------------------------------


def sound_run(top: Path) -> RunPaths:
    """The toy run, two more writers with several entries each, and a last note."""
    paths = toy_run(top).paths
    for number, host in enumerate(("node-2", "node-3")):
        writer = JournalWriter(paths, host=host, pid=7, clock=lambda day=20 + number: datetime(2026, 5, day, 9, tzinfo=UTC))
        for index in range(6):
            writer.append("note", title=f"{host} {index}", data={"text": "x" * 40})
        writer.append("checkpoint", launch=2, step=8, data={"path": f"checkpoints/opt_step-{8 + number}"})
        writer.close()
    with JournalWriter(paths, host="node-4", clock=lambda: datetime(2026, 5, 23, 9, tzinfo=UTC)) as last:
        for index in range(4):
            last.append("note", title=f"last {index}")
    step = top / "checkpoints" / "opt_step-5"
    step.mkdir(parents=True)
    (step / "model.bin").write_bytes(b"weights")
    return paths


# --- the damages: each takes a file's lines (with their newlines) and gives its new content; None = no file --------------

Lines = list[bytes]
Damage = Callable[[Lines, random.Random], bytes | None]


def _with(lines: Lines, index: int, line: bytes) -> bytes:
    return b"".join([*lines[:index], line, *lines[index + 1 :]])


def _middle(lines: Lines, rng: random.Random) -> int:
    return rng.randrange(0, len(lines) - 1)


def torn_in_the_middle(lines: Lines, rng: random.Random) -> bytes:
    index = _middle(lines, rng)
    return _with(lines, index, lines[index][: rng.randrange(1, len(lines[index]) - 1)] + b"\n")


def joined(lines: Lines, rng: random.Random) -> bytes:
    index = _middle(lines, rng)
    return _with(lines, index, lines[index][:-1])


def flipped(lines: Lines, rng: random.Random) -> bytes:
    index = _middle(lines, rng)
    line = bytearray(lines[index])
    line[rng.randrange(len(line) - 1)] ^= 1 << rng.randrange(7)
    return _with(lines, index, bytes(line))


def last_line_changed(lines: Lines, rng: random.Random) -> bytes:
    return _with(lines, len(lines) - 1, lines[-1].replace(b'"v":1', b'"v": 1'))


def emptied(lines: Lines, rng: random.Random) -> bytes:
    return b""


def deleted(lines: Lines, rng: random.Random) -> None:
    return None


def cut_at_a_line_end(lines: Lines, rng: random.Random) -> bytes:
    return b"".join(lines[: rng.randrange(1, len(lines))])


def cut_in_a_line(lines: Lines, rng: random.Random) -> bytes:
    index = rng.randrange(1, len(lines))
    return b"".join(lines[:index]) + lines[index][: rng.randrange(1, len(lines[index]) - 1)]


def swapped(lines: Lines, rng: random.Random) -> bytes:
    index = _middle(lines, rng)
    return b"".join([*lines[:index], lines[index + 1], lines[index], *lines[index + 2 :]])


def duplicated(lines: Lines, rng: random.Random) -> bytes:
    index = rng.randrange(len(lines))
    return b"".join([*lines[: index + 1], *lines[index:]])


def line_removed(lines: Lines, rng: random.Random) -> bytes:
    return _with(lines, _middle(lines, rng), b"")


def zeroed(lines: Lines, rng: random.Random) -> bytes:
    index = _middle(lines, rng)
    return _with(lines, index, b"\0" * len(lines[index]))


def garbage_added(lines: Lines, rng: random.Random) -> bytes:
    index = _middle(lines, rng)
    return _with(lines, index, lines[index] + b"\xff\xfe not a line\n")


def newer_version(lines: Lines, rng: random.Random) -> bytes:
    index = _middle(lines, rng)
    return _with(lines, index, lines[index].replace(b'"v":1', b'"v":2', 1))


DAMAGES: tuple[Damage, ...] = (
    torn_in_the_middle, joined, flipped, last_line_changed, emptied, deleted, cut_at_a_line_end, cut_in_a_line,
    swapped, duplicated, line_removed, zeroed, garbage_added, newer_version,
)  # fmt: skip


def damage(paths: RunPaths, seed: int) -> str:
    """Damage one recorded writer's file; returns what was done."""
    rng = random.Random(seed)
    doing = DAMAGES[seed % len(DAMAGES)]
    path = rng.choice(sorted(paths.journal_dir.glob("*.jsonl"))[:3])
    content = doing(path.read_bytes().splitlines(keepends=True), rng)
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    return f"{doing.__name__} {path.name}"


def picture(top: Path) -> dict[str, str]:
    """Every file with its digest."""
    files = (path for path in top.rglob("*") if path.is_file() and path.name != "rollback.lock")
    return {str(path.relative_to(top)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


# --- said, and not decided upon ----------------------------------------------------------------------------------------


def test_a_sound_journal_is_not_called_damaged(tmp_path: Path, chronicle: Cli) -> None:
    paths = sound_run(tmp_path)
    assert find_damage(paths, read_journal(paths)) == ()
    assert "DAMAGED" not in chronicle("status").out
    assert "damaged" not in chronicle("rollback", "--to", "5", "--yes").err


@pytest.mark.parametrize("seed", range(42))
def test_damage_is_said_and_nothing_is_decided(tmp_path: Path, chronicle: Cli, seed: int) -> None:
    paths = sound_run(tmp_path)
    done = damage(paths, seed)
    before = picture(tmp_path)
    audited = chronicle("audit", "--json")
    assert audited.code == 5, done
    assert any(finding["severity"] == "error" for finding in audited.json["findings"]), done
    assert " ".join(chronicle("status").out.split()).startswith("DAMAGED: the journal of run `toy` is damaged: `journal/"), done
    assert chronicle("status", "--json").json["damage"], done
    refused = chronicle("rollback", "--to", "5", "--yes")
    assert refused.code == 3 and "is damaged" in refused.err and "--force" in refused.err, done
    assert picture(tmp_path) == before, done


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("undo", "--yes"), 3),
        (("recover",), 3),
        (("prune", "--yes"), 3),
        (("rollback", "--to", "5", "--dry-run"), 3),
        (("run", "--", "true"), 3),
        (("run", "--autopilot", "--", "true"), 3),
    ],
)
def test_every_command_that_decides_refuses(tmp_path: Path, chronicle: Cli, words: tuple[str, ...], code: int) -> None:
    paths = sound_run(tmp_path)
    min(paths.journal_dir.glob("*.jsonl")).write_bytes(b"")
    before = picture(tmp_path)
    refused = chronicle(*words)
    assert refused.code == code, refused.err
    assert "is damaged" in refused.err and "chronicle audit" in refused.err
    assert picture(tmp_path) == before


def test_no_rollback_is_proposed_by_a_damaged_journal(tmp_path: Path, chronicle: Cli) -> None:
    """A lost entry may be a rollback. What the log shows is told all the same."""
    paths = sound_run(tmp_path)
    with MetricsWriter(paths.metrics_path(2)) as log:
        for step in range(9, 600):
            log.write(step, {"loss": 2.0 + 0.01 * (step % 7) + max(0.0, 0.02 * (step - 400))})
    assert chronicle("watch", "--once", "--json").json["proposals"]
    min(paths.journal_dir.glob("*.jsonl")).write_bytes(b"")
    looked = chronicle("watch", "--once", "--json")
    assert looked.code == 0 and looked.json["events"] and looked.json["proposals"] == []
    assert "no proposal could be made" in looked.json["problem"] and "is damaged" in looked.json["problem"]


def test_admission_of_a_launch_refuses_and_a_reason_starts_it(tmp_path: Path) -> None:
    """Under the run's lock, again: the journal may have been damaged since the command began."""
    paths = sound_run(tmp_path)
    min(paths.journal_dir.glob("*.jsonl")).unlink()
    with pytest.raises(Refusal, match="is damaged"):
        ensure_startable(paths, read_journal(paths), now=0.0)
    ensure_startable(paths, read_journal(paths), now=0.0, force="known")


def test_autopilot_halts_when_the_journal_was_damaged_during_the_launch(tmp_path: Path) -> None:
    paths = sound_run(tmp_path)

    class Stopped:
        launch, exit_code, data = 3, 0, {"stopped_by": "proposal"}

    def launch() -> Stopped:
        with JournalWriter(paths) as writer:
            writer.append("proposal", launch=3, data={"command": "chronicle rollback --to 5", "reasons": ["diverged"]})
        min(paths.journal_dir.glob("*.jsonl")).unlink()
        return Stopped()

    said: list[str] = []
    run_autopilot(paths, launch, lambda words: pytest.fail(f"ran {words}"), said.append)
    assert "halt" in said[0] and "is damaged" in said[0]


def test_a_reason_goes_on_and_is_journalled(tmp_path: Path, chronicle: Cli, pristine: Path) -> None:
    subprocess.run(["cp", "-a", str(pristine / "checkpoints"), str(tmp_path)], check=True)
    assert chronicle("note", "one").code == 0
    run = next((tmp_path / "logs").iterdir())
    (path,) = (run / "journal").glob("*.jsonl")
    assert chronicle("note", "two").code == 0
    path.write_bytes(b"")
    plan = tmp_path / "plan.json"
    assert chronicle("rollback", "--to", "10", "--plan-out", str(plan)).code == 3
    assert chronicle("rollback", "--to", "10", "--plan-out", str(plan), "--force", "known").code == 0
    assert chronicle("apply", str(plan), "--yes").code == 3
    assert chronicle("apply", str(plan), "--yes", "--force", "restored by hand").code == 0
    (intent,) = read_journal(RunPaths(run)).of_kind("rollback.intent")
    assert intent.data["force"] == "restored by hand"
    assert intent.data["overrode"][0].startswith(f"journal/{path.name}: ") and "chain-cut" in str(intent.data["overrode"])
    assert chronicle("apply", str(plan), "--yes").code == 3  # "already applied" would be a decision too
    assert chronicle("recover").code == 3
    assert chronicle("recover", "--force", "known").code == 0


def test_a_last_line_cut_short_by_a_crash_is_said_and_blocks_nothing(tmp_path: Path, chronicle: Cli) -> None:
    """Also for `recover`: an intent whose line is torn was never acted upon."""
    paths = sound_run(tmp_path)
    with max(paths.journal_dir.glob("*.jsonl")).open("ab") as file:
        file.write(b'{"v":1,"id":"01J')
    assert find_damage(paths, read_journal(paths)) == ()
    recovered = chronicle("recover")
    assert recovered.code == 0 and "a write was interrupted" in recovered.err
    assert "torn-line" in chronicle("audit").out


def test_an_empty_file_is_damage_without_any_other_writer(tmp_path: Path, chronicle: Cli) -> None:
    """A journal file has its name only when its first entry is on disk."""
    paths = toy_run(tmp_path).paths
    next(paths.journal_dir.glob("*.jsonl")).write_bytes(b"")
    assert chronicle("undo", "--yes").code == 3
    assert "empty-file" in chronicle("audit").out


def test_a_journal_without_its_only_file_is_damage(tmp_path: Path, chronicle: Cli) -> None:
    """`run.json` and the logged steps show that there was one."""
    paths = toy_run(tmp_path).paths
    next(paths.journal_dir.glob("*.jsonl")).unlink()
    assert chronicle("run", "--", "true").code == 3
    assert chronicle("status").out.startswith("DAMAGED: ")


def test_a_cut_of_the_last_writers_file_is_damage(tmp_path: Path, chronicle: Cli) -> None:
    """No other writer recorded its last line: the writer itself did, when it closed the file."""
    paths = toy_run(tmp_path).paths
    with JournalWriter(paths) as last:
        last.append("note", title="one")
        last.append("note", title="two")
    path = max(paths.journal_dir.glob("*.jsonl"))
    whole = path.read_bytes()
    assert find_damage(paths, read_journal(paths)) == ()
    path.write_bytes(b"".join(whole.splitlines(keepends=True)[:-1]))
    assert chronicle("undo", "--yes").code == 3
    assert chronicle("status").out.startswith("DAMAGED: ")
    assert "`journal-ends` recorded as the last one" in chronicle("audit").out
    path.write_bytes(whole)
    assert find_damage(paths, read_journal(paths)) == ()


def test_a_line_that_another_hosts_append_overwrote_says_nothing(tmp_path: Path) -> None:
    """On NFS two appends may end in one place: such a line must not call a sound journal damaged."""
    paths = toy_run(tmp_path).paths
    with JournalWriter(paths) as last:
        last.append("note", title="one")
    (line,) = paths.ends_path.read_text().splitlines(keepends=True)
    paths.ends_path.write_text(line[:40] + line + line[:-10] + "0123abcd\n" + "ab cd\n\0\0\0\n")
    assert find_damage(paths, read_journal(paths)) == ()


def test_a_writer_whose_first_entry_failed_notes_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file does not exist: a note about it would call the journal damaged."""
    paths = toy_run(tmp_path).paths
    before = paths.ends_path.read_bytes() if paths.ends_path.exists() else b""
    with JournalWriter(paths) as writer, monkeypatch.context() as patch:
        writer.place  # noqa: B018 settled before the disk is full
        patch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(JournalError):
            writer.append("note", title="lost")
    assert (paths.ends_path.read_bytes() if paths.ends_path.exists() else b"") == before
    assert find_damage(paths, read_journal(paths)) == ()


def test_an_interrupted_first_entry_notes_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C before the file has its name: the writer is closed, and no note may speak of a file that nobody will find."""
    paths = toy_run(tmp_path).paths
    before = paths.ends_path.read_bytes() if paths.ends_path.exists() else b""
    with JournalWriter(paths) as writer:
        writer.place  # noqa: B018 settled before the interruption
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                writer.append("note", title="lost")
    assert (paths.ends_path.read_bytes() if paths.ends_path.exists() else b"") == before
    assert find_damage(paths, read_journal(paths)) == ()


def test_a_process_that_ends_without_closing_its_journal_notes_its_end(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from chronicle.journal import JournalWriter;"
        "from chronicle.paths import RunPaths;"
        "writer = JournalWriter(RunPaths(Path(sys.argv[1])));"
        "writer.append('note', title='one')"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], check=True)
    assert RunPaths(tmp_path / "run").ends_path.read_text().count("\n") == 1

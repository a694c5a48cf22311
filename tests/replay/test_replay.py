"""A real launch of a plain script is replayed in a scratch directory; nothing of the run changes, whatever ends the replay."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from benchmarks.replay.causes import HELPERS, OBJECTIVE, TRAIN, digests
from benchmarks.replay.planting import fault, plant
from chronicle.journal import read_journal
from chronicle.paths import RunPaths

ROOT = Path(__file__).resolve().parents[2]


def environ() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CHRONICLE_")}
    return kept | {"OMP_NUM_THREADS": "1", "CHRONICLE_PRINTS": "every", "PYTHONPATH": str(ROOT)}


def words(*more: str) -> list[str]:
    run = ["--run", "small", "--logs", "logs", "--checkpoints", "checkpoints"]
    return [sys.executable, "-m", "chronicle_ml", more[0], *run, *more[1:]]


def chronicle(directory: Path, *more: str, planted: str = "") -> subprocess.CompletedProcess[str]:
    command, variables = words(*more), plant(environ(), planted)
    return subprocess.run(command, cwd=directory, env=variables, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 24 steps with checkpoints at 10 and 20."""
    import torch

    directory = tmp_path_factory.mktemp("replay").resolve()
    for name, text in (("train.py", TRAIN), ("objective.py", OBJECTIVE), ("helpers.py", HELPERS)):
        (directory / name).write_text(text)
    generator = torch.Generator().manual_seed(5)
    rows, labels = torch.randn(400, 8, generator=generator), torch.randint(0, 3, (400,), generator=generator)
    torch.save((rows, labels), directory / "data.pt")
    done = chronicle(directory, "run", "--", sys.executable, "train.py", "24")
    assert done.returncode == 0, done.stderr[-2000:]
    return directory


def test_recorded_steps_are_reproduced_and_nothing_of_the_run_changes(recorded: Path) -> None:
    before = digests(recorded)
    done = chronicle(recorded, "replay", "22", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert (found["verdict"], found["start"], found["compared"]) == ("reproduced", 20, 2)
    assert {"batch", "gradient", "weights", "torch", "options", "loss"} <= set(found["parts"])
    after = digests(recorded)
    assert {path: after.get(path) for path in before} == before
    assert all("/journal" in path or path.endswith("run.json") for path in after.keys() - before.keys())
    (entry,) = read_journal(RunPaths(recorded / "logs" / "small")).of_kind("replay")
    assert (entry.launch, entry.step, entry.data["verdict"]) == (1, 22, "reproduced")


@pytest.mark.slow
def test_a_replay_that_is_killed_leaves_no_process_and_no_byte(recorded: Path) -> None:
    before = digests(recorded)
    command = words("replay", "18")
    process = subprocess.Popen(command, cwd=recorded, env=environ(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not _trainers(recorded):
        time.sleep(0.05)
    assert _trainers(recorded), "the trainer never began"
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and _trainers(recorded):
        time.sleep(0.1)
    assert _trainers(recorded) == []
    after = digests(recorded)
    assert {path: after.get(path) for path in before} == before


def _trainers(directory: Path) -> list[int]:
    """Living processes of this test's trainer, by their working directory in a scratch directory."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            is_trainer = b"train.py" in (entry / "cmdline").read_bytes().split(b"\0")
            if entry.name.isdigit() and is_trainer and os.path.realpath(entry / "cwd").endswith(f"/tree{directory}"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.mark.slow
def test_what_cannot_be_replayed_names_the_missing_piece(recorded: Path) -> None:
    missing = chronicle(recorded, "replay", "99")
    assert missing.returncode == 3 and "no prints of step 99" in missing.stderr
    wrong = chronicle(recorded, "replay", "0")
    assert wrong.returncode == 2 and "expected 1 or more" in wrong.stderr


@pytest.mark.slow
def test_a_step_before_the_first_checkpoint_is_played_from_the_beginning(recorded: Path) -> None:
    done = chronicle(recorded, "replay", "3", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["start"] == 0 and not json.loads(done.stdout).get("checkpoint")


@pytest.mark.slow
def test_a_changed_line_is_named(recorded: Path) -> None:
    script = recorded / "helpers.py"
    text = script.read_text()
    script.write_text(text.replace("return 1.0", "return 1.01"))
    try:
        done = chronicle(recorded, "replay", "22", "--json")
    finally:
        script.write_text(text)
    assert done.returncode == 5
    assert json.loads(done.stdout)["verdict"] == "code, packages or settings differ"
    assert "helpers.py" in json.loads(done.stdout)["why"]


@pytest.mark.slow
def test_what_no_checkpoint_holds_is_unexplained(recorded: Path, tmp_path: Path) -> None:
    """A counter of the script's own: every replay from a checkpoint differs at once."""
    counts = "    calls += 1\n    loss = loss * (1 + 0.01 * calls)\n"
    _copied(recorded, tmp_path, BEGIN, "last, calls = int(sys.argv[1]), 0", LOSS, counts + LOSS)
    assert chronicle(tmp_path, "run", "--", sys.executable, "train.py", "24").returncode == 0
    done = chronicle(tmp_path, "replay", "22", "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["verdict"], found["replays"]) == (5, "unexplained", 2), found
    assert any("state that the checkpoint lacks" in words for words in found["evidence"])


@pytest.mark.slow
def test_a_loader_that_no_checkpoint_holds_is_a_lack_of_the_checkpoint(recorded: Path, tmp_path: Path) -> None:
    _copied(recorded, tmp_path, ", generator=torch.Generator()", "")
    assert chronicle(tmp_path, "run", "--", sys.executable, "train.py", "24").returncode == 0
    found = json.loads(chronicle(tmp_path, "replay", "22", "--json").stdout)
    assert found["verdict"] == "state differs" and "torch's generators" in found["why"], found


@pytest.mark.slow
def test_noise_that_shows_behind_the_first_difference_is_seen(recorded: Path, tmp_path: Path) -> None:
    """Two replays agree in the step that differs from the record, and not in a later one: nobody is accused of the first."""
    noise = "    loss = loss * (1 + (step == 23) * 1e-3 * (hash('x') % 1000))\n"
    _copied(recorded, tmp_path, LOSS, noise + LOSS)
    done = chronicle(tmp_path, "run", "--", sys.executable, "train.py", "24", planted=fault("gradient", 22, 5))
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(chronicle(tmp_path, "replay", "22", "--until", "24", "--json").stdout)
    assert found["verdict"] == "not deterministic", found


def _copied(recorded: Path, to: Path, *edits: str) -> None:
    """The same training elsewhere, with texts of its script replaced."""
    for name in ("objective.py", "helpers.py", "data.pt"):
        (to / name).write_bytes((recorded / name).read_bytes())
    text = TRAIN
    for before, after in zip(edits[::2], edits[1::2], strict=True):
        assert before in text
        text = text.replace(before, after)
    (to / "train.py").write_text(text)


BEGIN, LOSS = "last = int(sys.argv[1])", "    loss.backward()"


@pytest.mark.slow
def test_a_server_is_not_reached_unless_it_is_asked_for_and_what_it_says_is_unexplained(recorded: Path, tmp_path: Path) -> None:
    """A server outside gives the factor of the loss, and another one by now."""
    said, peers = ["1.0"], []
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()

        def answer() -> None:
            try:
                while True:
                    peer, address = server.accept()
                    peers.append(address)
                    peer.sendall(said[0].encode())
                    peer.close()
            except OSError:
                return  # the test is over

        threading.Thread(target=answer, daemon=True).start()
        port = server.getsockname()[1]
        asks = f"import socket\nfactor = float(socket.create_connection(('127.0.0.1', {port})).recv(9))\n"
        _copied(recorded, tmp_path, BEGIN, asks + BEGIN, LOSS, "    loss = loss * factor\n" + LOSS)
        assert chronicle(tmp_path, "run", "--", sys.executable, "train.py", "24").returncode == 0
        said[0], before = "1.01", len(peers)
        closed = chronicle(tmp_path, "replay", "22")
        assert closed.returncode != 0 and "--network lets it" in closed.stderr and len(peers) == before, closed.stderr
        found = json.loads(chronicle(tmp_path, "replay", "22", "--network", "--json").stdout)
    assert found["verdict"] == "unexplained", found
    assert any("answers of the network" in words for words in found["evidence"])

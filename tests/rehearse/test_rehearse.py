"""Real scripts are launched four times: what they lose at a resume is named, and what they do not lose is not."""

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

CHRONICLE = (sys.executable, "-m", "chronicle_ml")
# A trainer of the standard library: a number that is trained, a schedule, an average and a position in its data.
SCRIPT = '''
import os, pickle, random, signal, sys, time
out, lose = sys.argv[1], sys.argv[2]
state = {"weight": 5.0, "ema": {"value": 5.0, "decay_step": 0}, "param_groups": [{"lr": 0.1}], "state": {}, "step": 0}
state["random"] = None
rows = [random.Random(n).random() for n in range(1000)]
random.seed(None if lose == "seed" else 3)
position = 0
handed = os.environ.get("CHRONICLE_RESUME_FROM")
if handed and lose != "resume":
    with open(handed, "rb") as file:
        saved = pickle.load(file)
    kept = {name: state[name] for name in lose.split(",") if name in state}
    state = {**saved, **kept}
    position = 0 if lose == "data" else state["step"]
    if state["random"] is not None:
        random.setstate(state["random"])
if lose == "handler":
    signal.signal(signal.SIGTERM, lambda *_: (save(), sys.exit(143)))
def save():
    state["random"] = random.getstate()
    with open(f"{out}/step-{state['step']}.tmp", "wb") as file:
        pickle.dump(state, file)
    os.rename(f"{out}/step-{state['step']}.tmp", f"{out}/step-{state['step']}.pt")
while state["step"] < 30:
    state["weight"] -= state["param_groups"][0]["lr"] * (state["weight"] - rows[position] + random.gauss(0, 0.1))
    position += 1
    state["step"] += 1
    state["ema"]["decay_step"] += 1
    state["ema"]["value"] += 0.1 * (state["weight"] - state["ema"]["value"])
    print(f"step {state['step']} loss {state['weight'] ** 2:.8f} lr {state['param_groups'][0]['lr']}", flush=True)
    if state["step"] % 10 == 0 and lose not in ("handler", "saves"):
        save()
        time.sleep(1.5 if state["step"] == 10 else 0)
    if lose in ("handler", "saves"):
        time.sleep(0.1)
'''


def rehearse(place: Path, lose: str, *options: str, script: str = SCRIPT) -> tuple[int, dict[str, Any]]:
    if not (place / "train.py").exists():
        (place / "train.py").write_text(script)
    words = [*CHRONICLE, "rehearse", "--json", *options, "--", sys.executable, "train.py", "{out}", lose]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("CHRONICLE_")}
    environ["CHRONICLE_RUN"] = "small"
    done = subprocess.run(words, cwd=place, env=environ, capture_output=True, text=True, timeout=280, check=False)
    assert done.stdout, done.stderr[-3000:]
    return done.returncode, json.loads(done.stdout)


def test_a_script_that_loads_everything_resumes_exactly(tmp_path: Path) -> None:
    code, found = rehearse(tmp_path, "nothing")
    assert (code, found["verdict"], found["findings"]) == (0, "resumes exactly", [])
    assert (found["resumed_at"], found["compared_at"], found["logged_values"]) == (10, 20, 20)
    assert found["leaves"] > 600, "the state of the random generator is among them"
    assert any("no guard was attached" in row for row in found["not_compared"])
    words = [*CHRONICLE, "log", "--json", "--run", "small"]
    listed = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert [row["title"] for row in json.loads(listed.stdout)] == ["rehearsal (SIGKILL): resumes exactly"]
    assert not list(tmp_path.glob("*.pt")) and sorted(path.name for path in tmp_path.iterdir()) == ["logs", "train.py"]


def test_an_average_that_is_not_loaded_is_named(tmp_path: Path) -> None:
    code, found = rehearse(tmp_path, "ema")
    assert (code, found["verdict"]) == (5, "does not resume exactly")
    assert found["findings"][0]["what"] == "ema.decay_step"
    assert "20 → 10: it began anew at the resume; at step 10 it was 10" in found["findings"][0]["text"]
    assert {one["what"] for one in found["findings"]} == {"ema.decay_step", "ema.value"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lose", "first"),
    [("data", "loss"), ("random", "random.1.624"), ("resume", "the resume"), ("weight", "loss")],
)
def test_other_losses_are_named(tmp_path: Path, lose: str, first: str) -> None:
    code, found = rehearse(tmp_path, lose)
    assert code == 5 and first in [one["what"] for one in found["findings"]], found["findings"]


@pytest.mark.slow
def test_a_script_without_a_seed_is_not_called_exact(tmp_path: Path) -> None:
    code, found = rehearse(tmp_path, "seed")
    assert (code, found["findings"]) == (3, []) and found["verdict"].startswith("differs in nothing that was compared"), found


@pytest.mark.slow
def test_a_term_with_and_without_a_handler(tmp_path: Path) -> None:
    """With one the script resumes from where the signal came; without one every step is lost, and the way out is named."""
    code, found = rehearse(tmp_path, "handler", "--signal", "TERM", "--at", "5", "--to", "25")
    assert found["resumed_at"] >= 5 and re.match(r"TERM: saved at step \d+ within \d", found["notes"][0]), found
    code, found = rehearse(tmp_path, "saves", "--signal", "TERM", "--at", "5", "--to", "25")
    assert code == 5 and re.match(r"nothing saved, \d+ steps lost", found["findings"][0]["text"]), found
    assert found["verdict"] == "does not save when the signal comes"
    assert "enable_jit_checkpoint" in found["findings"][0]["advice"]


@pytest.mark.slow
def test_what_an_undisturbed_launch_saves_is_no_answer_to_a_signal(tmp_path: Path) -> None:
    """TERM comes after step 10, where the script saves by itself a moment later: that was told as its answer."""
    script = SCRIPT.replace("        save()\n", "        time.sleep(0.7)\n        save()\n").replace("sys.exit(143)", "None")
    script = script.replace('if lose == "handler"', 'if True').replace("lambda *_: (save(), None)", "lambda *_: end.append(1)")
    script = script.replace("while state", "end = []\nwhile not end and state")
    assert rehearse(tmp_path, "nothing", script=script)[0] == 0
    code, found = rehearse(tmp_path, "nothing", "--only", "term", script=script)
    assert (code, found["verdict"]) == (3, "could not be told"), found
    assert "the save of step 10 was due anyway; name another --at" in str(found["not_compared"]), found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_outlives_a_rehearsal_that_is_ended(tmp_path: Path, number: signal.Signals) -> None:
    script = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1], 'pid').write_text(str(os.getpid())); time.sleep(60)"
    words = [*CHRONICLE, "rehearse", "--run", "r", "--keep", "kept", "--", sys.executable, "-c", script, "{out}"]
    rehearsal = subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    written = tmp_path / "kept" / "a" / "out" / "pid"
    deadline = time.monotonic() + 60
    while not (written.is_file() and written.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    trainer = int(written.read_text())
    rehearsal.send_signal(number)
    _, said = rehearsal.communicate(timeout=60)
    assert rehearsal.returncode == 130 and "Traceback" not in said, said
    assert not Path(f"/proc/{trainer}").exists()


@pytest.mark.slow
def test_a_script_that_writes_beside_itself_runs_in_copies(tmp_path: Path) -> None:
    """No {out}: nothing is written into the working directory, and a checkpoint that lies there is not resumed from."""
    text = SCRIPT.replace('out, lose = sys.argv[1], sys.argv[2]', 'out, lose = "saved", "nothing"')
    text = text.replace("import os,", "import os; os.makedirs('saved', exist_ok=True)\nimport", 1)
    (tmp_path / "here.py").write_text(text)
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "step-10.pt").write_bytes(pickle.dumps({"param_groups": [{"lr": 0.1}], "state": {}, "step": 10}))
    before = sorted(path.name for path in tmp_path.rglob("*"))
    words = [*CHRONICLE, "rehearse", "--json", "--run", "r", "--logs", str(tmp_path / "logs"), "--", sys.executable, "here.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert json.loads(done.stdout)["verdict"] == "resumes exactly", done.stdout + done.stderr
    assert sorted(path.name for path in tmp_path.rglob("*") if "logs" not in path.parts) == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--resume-with", "python x", "--", "x", "{out}"], "in one of the two commands only"),
        (["--at", "9", "--to", "9", "--", "x", "{out}"], "0 < at < to"),
        ([], "no launcher given"), (["--signal", "STOP", "--", "x", "{out}"], "expected KILL, TERM, USR1, USR2, INT"),
    ],
)  # fmt: skip
def test_a_rehearsal_that_cannot_be_played_is_refused(tmp_path: Path, words: list[str], said: str) -> None:
    done = subprocess.run([*CHRONICLE, "rehearse", *words], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


def test_a_command_that_comes_to_no_step_says_so(tmp_path: Path) -> None:
    words = [*CHRONICLE, "rehearse", "--run", "r", "--", sys.executable, "-c", "print('hello')", "{out}"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "came to step 0 of 20" in done.stderr

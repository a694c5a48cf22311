"""ray PR #64928: a rank hangs, the job burns money, and every view says that it runs."""

import subprocess
import sys
from pathlib import Path

from tests.reproductions.case import Answer, Case

SCRIPT = """
import time
for step in range(1, 21):
    print(f"step {step} loss {3 - step * 0.05:.3f} lr 1e-3", flush=True)
    time.sleep(0.05)
time.sleep(600)
"""


def launch(folder: Path) -> subprocess.Popen[bytes]:
    (folder / "train.py").write_text(SCRIPT)
    return subprocess.Popen([sys.executable, "train.py"], cwd=folder, stdout=subprocess.DEVNULL)


def bare(folder: Path) -> None:
    process = launch(folder)
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        pass
    assert process.poll() is None, "it ended"
    process.kill()
    process.wait()


def guarded(folder: Path) -> str:
    command = [sys.executable, "-c", "from chronicle_ml import main; main()"]
    (folder / "train.py").write_text(SCRIPT)
    words = [*command, "run", "--run", "job", "--", sys.executable, "train.py"]
    run = subprocess.Popen(words, cwd=folder, stderr=subprocess.PIPE)
    try:
        run.wait(timeout=20)
    except subprocess.TimeoutExpired:
        status = subprocess.run([*command, "status", "--run", "job"], cwd=folder, capture_output=True, text=True, check=False)
        run.terminate()
        said = run.communicate(timeout=30)[1].decode()
        return f"{said}\n{status.stdout}"
    return "it ended"


CASE = Case(
    row=36,
    source="ray PR #64928, #64993; pytorch #196968; DLRover",
    pain="a rank hangs, and nothing says so for half an hour",
    without="the process waits",
    answer=Answer.NAMED,
    says=("no step for \\d+ s",),
    bare=bare,
    guarded=guarded,
)

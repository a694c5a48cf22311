"""`chronicle run`: what the trainer is told, what comes back, what is written, and when it refuses."""

import json
import os
import re
import resource
import shlex
import signal
import subprocess
import sys

import pytest

from chronicle.journal import JournalWriter
from chronicle.launch.heartbeat import Heartbeat, read_heartbeats, write_heartbeat
from tests.launch.driver import ROOT, is_alive


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code, *arguments]


def test_trainer_is_told_run_launch_and_token_and_output_is_unbuffered(driver):
    """The names are the interface to every trainer (brief); `-u` alone does not reach a launcher's children."""
    code = "import json, os; print(json.dumps({k: v for k, v in os.environ.items() if k.startswith(('CHRON', 'PYTHONU'))}))"
    driver.start(python(code), "--checkpoints", "ckpt")
    assert driver.wait() == 0
    printed = driver.paths.supervisor_log(1).read_text().splitlines()
    told = json.loads(next(line for line in printed if line.startswith("{")))
    token = driver.entries("launch.start")[0].data["token"]
    assert told.pop("CHRONICLE_MLFLOW_URI") == "off"  # the user's own settings pass through
    assert not os.path.exists(told.pop("CHRONICLE_PULSES"))  # a directory in memory, removed at the end
    assert told.pop("CHRONICLE_OUTPUT") == f"@chronicle-{token}"
    assert told == {
        "CHRONICLE_RUN": "demo",
        "CHRONICLE_RUN_DIR": str(driver.paths.run_dir),
        "CHRONICLE_LAUNCH": "1",
        "CHRONICLE_LAUNCH_DIR": str(driver.paths.launch_dir(1)),
        "CHRONICLE_TOKEN": token,
        "CHRONICLE_CHECKPOINTS": str(driver.directory / "ckpt"),
        "PYTHONUNBUFFERED": "1",
    }


@pytest.mark.parametrize("expected", [0, 7, 78])
def test_exit_code_of_the_launcher_passes_through(driver, expected):
    """DESIGN §5.5; 78 is a guard refusal: do not requeue."""
    driver.start(python(f"raise SystemExit({expected})"))
    assert driver.wait() == expected
    assert driver.entries("launch.end")[0].data["exit_code"] == expected


def test_launcher_killed_by_a_signal_gives_128_plus_its_number(driver):
    driver.start(python("import os; os.abort()"))
    assert driver.wait() == 128 + signal.SIGABRT
    assert driver.entries("launch.end")[0].data["signal"] == "SIGABRT"


def test_what_cannot_be_started_is_125_and_leaves_no_launch(driver):
    driver.start(["no-such-launcher-anywhere"])
    assert driver.wait() == 125
    assert driver.entries("launch.start") == []
    assert "is not an executable on the PATH" in driver.out.read_text()


def test_a_save_within_the_grace_is_finished(driver):
    """A launcher that dies of TERM at once (one-process accelerate) must not take its saving trainer with it."""
    driver.start_launcher("accelerate-1", "save", "--grace", "30")
    driver.process.send_signal(signal.SIGTERM)
    driver.wait()
    assert (driver.directory / "saved-0").read_text() == "all of it"
    assert driver.left() == []


@pytest.mark.parametrize("name, expected", [("USR1", 128 + signal.SIGUSR1), ("TERM", 0)])
def test_a_trainer_that_saved_and_ended_with_0_wants_a_requeue_only_after_a_schedulers_warning(driver, name, expected):
    """USR1 comes before a time limit: 0 would tell the batch script that the run is finished."""
    driver.start_launcher("python", "save", "--grace", "30")
    driver.process.send_signal(getattr(signal, f"SIG{name}"))
    assert driver.wait() == expected
    assert (driver.directory / "saved-0").exists()
    end = driver.entries("launch.end")[0]
    assert (end.data["launcher_code"], end.data["stop_signal"]) == (0, f"SIG{name}")
    assert end.title.startswith(f"launch 1 saved and ended on SIG{name}: ")


@pytest.mark.parametrize("name", ["QUIT", "USR2"])
def test_a_signal_that_would_end_the_supervisor_without_a_record_is_taken_for_term(driver, name):
    """Their default: no end, no grace, and the ranks are orphans."""
    driver.start_launcher("python", "save", "--grace", "30")
    driver.process.send_signal(getattr(signal, f"SIG{name}"))
    assert driver.wait() == 0
    assert (driver.directory / "saved-0").exists() and driver.left() == []
    end = driver.entries("launch.end")[0].data
    assert (end["stopped_by"], end["stop_signal"]) == ("signal", "SIGTERM")


def test_second_interrupt_ends_the_grace(driver):
    """A person who presses Ctrl-C twice does not want to wait for a minute."""
    pids = driver.start_launcher("python", "ignore", "--grace", "600")
    driver.process.send_signal(signal.SIGINT)
    driver.until(lambda: "SIGINT forwarded" in driver.out.read_text(), "the first interrupt to be forwarded")
    driver.process.send_signal(signal.SIGINT)
    assert driver.wait(60) == 128 + signal.SIGINT
    assert [pid for pid in pids if is_alive(pid)] == []


def test_exit_report_names_the_rank_that_ended_first_and_its_last_lines(driver):
    """Not the launcher's own traceback, which blames whoever it reaped first."""
    code = (
        "import os, sys, time; from chronicle.launch.ranks import open_rank_output; assert open_rank_output();"
        "r = os.environ['RANK']; print('rank', r, 'starts'); time.sleep(1.0 if r == '1' else 600);"
        "print('CUDA error: uncorrectable ECC'); sys.exit(9)"
    )
    script = driver.directory / "train.py"
    script.write_text(code)
    driver.start([str(sys.executable), "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)])
    assert driver.wait() == 1
    end = driver.entries("launch.end")[0].data
    assert end["first_to_end"]["rank"] == 1
    assert end["tail_of"] == "rank 1"
    assert end["tail"] == ["rank 1 starts", "CUDA error: uncorrectable ECC"]
    assert driver.paths.rank_log(1, 0).read_text() == "rank 0 starts\n"
    assert "[1] CUDA error: uncorrectable ECC\n" in driver.out.read_text()


def test_lines_of_two_ranks_are_never_torn(driver):
    """With `-u` alone 4,672 of 6,000 lines were torn (formats §5)."""
    script = driver.directory / "train.py"
    script.write_text(
        "import os; from chronicle.launch.ranks import open_rank_output; open_rank_output()\n"
        "for i in range(2000): print('rank', os.environ['RANK'], 'line', i, 'end')\n"
    )
    both = (
        "import os, subprocess, sys; ranks = [subprocess.Popen([sys.executable, '-u', 'train.py'],"
        " env=os.environ | {'RANK': r, 'WORLD_SIZE': '2'}) for r in '01']; sys.exit(max(r.wait() for r in ranks))"
    )
    driver.start(python(both))
    assert driver.wait() == 0
    for rank in range(2):
        expected = [f"rank {rank} line {i} end" for i in range(2000)]
        assert driver.paths.rank_log(1, rank).read_text().splitlines() == expected
    merged = [line for line in driver.paths.supervisor_log(1).read_text().splitlines() if line.endswith(" end")]
    assert sorted(merged) == sorted(f"[{r}] rank {r} line {i} end" for r in range(2) for i in range(2000))


def test_full_disk_for_logs_costs_lines_and_not_the_run(driver):
    """RLIMIT_FSIZE stands in for the full disk: same failing write, no root needed."""
    command = driver.chronicle(
        "run", "--run", "demo", "--", *python("for i in range(20000): print('line', i)\nprint('trained to the end')")
    )
    limit = 16384
    done = subprocess.run(
        command,
        cwd=driver.directory,
        env=driver.environ,
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert done.returncode == 0
    assert "trained to the end" in done.stdout
    assert done.stderr.count("cannot write") == 1
    assert driver.entries("launch.end")[0].data["log_bytes_lost"] > 100_000
    assert driver.paths.supervisor_log(1).stat().st_size <= limit


def test_broken_journal_costs_entries_and_not_the_run(driver):
    driver.paths.run_dir.mkdir(parents=True)
    driver.paths.journal_dir.write_text("not a directory")
    driver.start(python("print('trained to the end')"))
    assert driver.wait() == 0
    printed = driver.out.read_text()
    assert "trained to the end" in printed
    assert printed.count("cannot write to the journal") == 1


def test_a_breakpoint_on_a_terminal_does_not_end_the_run_and_this_is_said(driver):
    """The trainer's session has no terminal: a debugger's prompt reads the end of a file, and the run was lost."""
    ours, theirs = os.openpty()
    command = driver.chronicle("run", "--run", "demo", "--", *python("breakpoint(); print('went on')"))
    done = subprocess.run(
        command, cwd=driver.directory, env=driver.environ, stdin=theirs, capture_output=True, text=True, timeout=60
    )
    os.close(ours)
    os.close(theirs)
    assert done.returncode == 0 and "went on" in done.stdout
    assert "`breakpoint()` is skipped" in done.stdout + done.stderr


def test_refuses_over_a_live_launch_of_the_same_run(driver):
    driver.start_launcher("python", "plain", "--grace", "2")
    second = driver.call("ps")
    assert "supervisor" in second.stdout and "supervised" in second.stdout
    refused = subprocess.run(
        driver.chronicle("run", "--run", "demo", "--", *python("print('never')")),
        cwd=driver.directory, env=driver.environ, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert refused.returncode == 125
    assert "alive here" in refused.stderr and "never" not in refused.stdout
    other = driver.chronicle("run", "--run", "another", "--", *python("print('other runs may start')"))
    done = subprocess.run(other, cwd=driver.directory, env=driver.environ, capture_output=True, text=True, timeout=60)
    assert done.stdout.endswith("other runs may start\n")


def test_refuses_while_a_rollback_is_open_and_starts_after_its_receipt(driver):
    """DESIGN §5.4: a loader must never see a half-done edit."""
    with JournalWriter(driver.paths) as writer:
        intent = writer.append("rollback.intent", step=5)
        driver.start(python("print('started')"))
        assert driver.wait() == 125
        assert "chronicle recover" in driver.out.read_text()
        writer.append("rollback.receipt", step=5, refs=[intent.id])
    driver.start(python("print('started')"))
    assert driver.wait() == 0


def test_fresh_heartbeat_of_another_host_refuses_unless_forced_and_a_stale_one_does_not(driver):
    """Processes of another node cannot be seen: three minutes without a sign of life count as the end."""
    import time

    start = {"host": "node7", "pid": 4, "start_ticks": 9, "boot_id": "elsewhere", "token": "t" * 32}
    with JournalWriter(driver.paths) as writer:
        writer.append("launch.start", launch=1, data=start)
    driver.paths.launch_dir(1).mkdir(parents=True)
    beat = {"host": "node7", "launch": 1, "pid": 4, "start_ticks": 9, "boot_id": "elsewhere", "uid": 0}
    assert write_heartbeat(driver.paths.heartbeats_dir, Heartbeat(**beat, time=time.time())) is None
    driver.start(python("print('started')"))
    assert driver.wait() == 125
    assert "`node7`" in driver.out.read_text()
    driver.start(python("print('started')"), "--force", "node7 is switched off")
    assert driver.wait() == 0
    assert driver.entries("launch.start")[-1].data["force"] == "node7 is switched off"
    write_heartbeat(driver.paths.heartbeats_dir, Heartbeat(**beat, time=time.time() - 200))
    driver.start(python("print('started')"))
    assert driver.wait() == 0


def test_heartbeat_lists_the_processes_while_running_and_is_gone_afterwards(driver):
    pids = driver.start_launcher("python", "plain", "--grace", "2")
    beats = read_heartbeats(driver.paths.heartbeats_dir)
    assert [beat.pid for beat in beats] == [driver.process.pid]
    assert pids[0] in [pid for pid, _ in beats[0].processes]
    driver.process.send_signal(signal.SIGTERM)
    driver.wait()
    assert read_heartbeats(driver.paths.heartbeats_dir) == []


def test_leftover_of_a_launcher_that_ended_well_is_ended(driver):
    code = "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)"
    driver.start(python(code))
    assert driver.wait() == 0
    assert driver.left() == []
    assert "left 1 processes" in driver.out.read_text()


def test_a_launch_whose_supervisor_was_killed_gets_its_end_from_the_next_one(driver):
    driver.start_launcher("python", "plain")
    driver.process.kill()
    driver.wait()
    driver.until(lambda: driver.call("sweep", "--yes").stdout.startswith(("no orphans", " ")), "the sweep")
    driver.start(python("print('second')"))
    assert driver.wait() == 0
    ends = {entry.launch: entry.data for entry in driver.entries("launch.end")}
    assert ends[1]["inferred"] is True
    assert ends[2]["exit_code"] == 0


def test_reader_that_goes_away_does_not_end_the_run(driver):
    """`chronicle run … | head -1`."""
    code = "import time\nfor i in range(50): print(i); time.sleep(0.01)\nopen('done', 'w').close()"
    words = shlex.join(driver.chronicle("run", "--run", "demo", "--", *python(code)))
    subprocess.run(f"{words} | head -1", shell=True, cwd=driver.directory, env=driver.environ, timeout=60, check=True)
    assert (driver.directory / "done").exists()


def test_run_imports_nothing_heavy():
    """A supervisor with torch inside would cost 200 MB beside every launch."""
    heavy = "('torch', 'numpy', 'mlflow', 'pydantic', 'matplotlib', 'psutil')"
    ours = "chronicle.cli.run, chronicle.launch.launching, chronicle.cli.processes, chronicle.cli.processes"
    code = f"import sys; import {ours}; print([name for name in {heavy} if name in sys.modules])"
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environ)
    assert done.stdout == "[]\n"


DIVERGING = """
import math, os, random, time
from pathlib import Path
from chronicle.metrics.log import MetricsWriter

random.seed(1)
with MetricsWriter(Path(os.environ["CHRONICLE_LAUNCH_DIR"]) / "metrics.jsonl") as log:
    for step in range(10, 8000, 10):
        loss = 2.0 + random.gauss(0, 0.05) + (0 if step < 5000 else 0.02 * (step - 5000) / 10)
        log.write(step, {"loss": loss, "lr": 1e-3, "grad_norm": 1.0})
print("logged", flush=True)
time.sleep(600)
"""


def test_stop_on_proposal_ends_the_launch_and_the_journal_says_why(driver):
    """The live detector is the supervisor's guest; with `--on-propose stop` its proposal is a reason to end."""
    driver.start(python(DIVERGING), "--on-propose", "stop", "--grace", "5")
    assert driver.wait() == 128 + signal.SIGTERM
    end = driver.entries("launch.end")[0].data
    assert end["stopped_by"] == "proposal"
    assert end["last_step"] == 7990
    assert "diverge" in end["proposal"]
    assert driver.left() == []


def test_proposal_alone_does_not_stop_a_run(driver):
    driver.start(python(DIVERGING.replace("sleep(600)", "sleep(4)")))
    assert driver.wait() == 0
    assert [entry.data["tier"] for entry in driver.entries("incident")].count("propose") >= 1


def test_start_step_is_read_from_the_log_of_a_trainer_that_logs_every_tenth_step(driver):
    """10, 20, 30 started at step 0: lineage would otherwise begin at 9."""
    driver.start(python(DIVERGING.replace("sleep(600)", "sleep(0)")))
    assert driver.wait() == 0
    assert driver.entries("launch.step")[0].data == {"start_step": 0, "inferred": True}


FLOOD = """
import signal, sys
told = []
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *_: told.append(True))
for i in range(2_000_000):
    print("step", i, "loss", 1.0 / (i + 1))
    if told:
        print("told at", i, flush=True)
        sys.exit(0)
sys.exit(3)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_a_trainer_that_prints_without_a_pause(driver, number):
    """It arrives long before the output is parsed; and every line is in the log."""
    supervisor = driver.start([sys.executable, "-c", FLOOD])
    log = driver.paths.launch_dir(1) / "supervisor.log"
    driver.until(lambda: log.exists() and log.stat().st_size > 1 << 20, "a flood")
    os.kill(supervisor, number)
    driver.wait(300)
    lines = re.sub(r"chronicle: .*\n", "", log.read_text()).splitlines()
    assert lines[-1] == f"told at {len(lines) - 2}"
    assert driver.entries("launch.end")[0].data["stop_signal"] == signal.Signals(number).name


ENDS_ITSELF = """
import os, signal, sys
from pathlib import Path
from chronicle.launch import launching
from chronicle.paths import RunPaths

before = launching.describe_end

def describe_end(*words, **more):  # the launch is over, and its end is not written yet
    os.kill(os.getpid(), signal.SIGTERM)
    return before(*words, **more)

launching.describe_end = describe_end
paths = RunPaths(Path("logs/r"))
request = launching.LaunchRequest(
    command=("true",), paths=paths, checkpoints_dir=None, cwd=Path.cwd(), environ=dict(os.environ), grace_seconds=1.0
)
launching.launch(request)
"""


def test_a_signal_while_the_end_is_written_does_not_lose_it(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", ENDS_ITSELF], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGTERM, done.stderr
    journals = (tmp_path / "logs/r/journal").glob("*.jsonl")
    assert "launch.end" in [json.loads(line).get("kind") for path in journals for line in path.read_text().splitlines()]

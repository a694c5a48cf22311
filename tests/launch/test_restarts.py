"""A run that comes back by itself: the policy by cause, progress as a newer verified checkpoint, and what is handed on."""

import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from chronicle import attach
from chronicle.checkpoints import SaveWatch
from chronicle.cli.main import run as chronicle
from chronicle.journal import JournalWriter
from chronicle.journal.events import EndCause, LaunchEnd, LaunchStart
from chronicle.latest import Latest, PassedOver, Why
from chronicle.launch import handover, restarts
from chronicle.launch.nodes import Peers
from chronicle.launch.provenance import host_name
from chronicle.launch.restarts import RULES, Attempt, NotResumable, Policy, Verdict, decide_onward
from chronicle.launch.slurm import format_sbatch
from chronicle.settings import load_settings
from tests.launch.driver import ROOT

POLICY = Policy(restarts=5, crashes=3, pause_seconds=10.0)


def attempts(*pairs):
    return [Attempt(cause, progress) for cause, progress in pairs]


CRASH, LOST, NOTHING, SAVED = EndCause.CRASH, EndCause.NODE_LOST, False, True


@pytest.mark.parametrize(
    "history, verdict, pause",
    [
        ([(EndCause.FINISHED, NOTHING)], Verdict.FINISHED, 0),
        ([(EndCause.EARLY, NOTHING)], Verdict.HERE, 10),
        ([(EndCause.EARLY, SAVED)] * 2, Verdict.STOP, 0),  # early stopping, perhaps
        ([(CRASH, SAVED)], Verdict.HERE, 0),  # the run gets on: nothing is waited for
        ([(CRASH, NOTHING)], Verdict.HERE, 10),
        ([(CRASH, NOTHING), (CRASH, NOTHING)], Verdict.HERE, 20),
        ([(CRASH, NOTHING)] * 3, Verdict.STOP, 0),
        ([(CRASH, NOTHING)] * 2 + [(CRASH, SAVED), (CRASH, NOTHING)], Verdict.HERE, 10),
        ([(LOST, NOTHING)] * 5, Verdict.NEW_JOB, 0),
        ([(EndCause.TIME_LIMIT, NOTHING)] * 3, Verdict.STOP, 0),  # no save fits into the job
        ([(EndCause.PREEMPTED, SAVED)] * 6, Verdict.STOP, 0),  # five restarts were allowed
        ([(EndCause.OUT_OF_MEMORY, SAVED)], Verdict.STOP, 0),
        ([(EndCause.REFUSED, SAVED)], Verdict.STOP, 0),
        ([(EndCause.DISK_FULL, SAVED)], Verdict.STOP, 0),
        ([(EndCause.STOPPED, SAVED)], Verdict.STOP, 0),
    ],
)
def test_the_policy_is_by_cause_progress_and_budget(history, verdict, pause):
    decision = decide_onward(attempts(*history), POLICY)
    assert (decision.verdict, decision.pause_seconds) == (verdict, pause)
    assert decision.reason


def test_a_full_disk_goes_on_when_there_is_room_for_the_next_save(tmp_path, monkeypatch):
    """It was full when the launch ended; somebody frees it, or nobody does."""
    with_room = [Attempt(EndCause.DISK_FULL, NOTHING, room=True)]
    assert decide_onward(with_room, POLICY).verdict is Verdict.HERE
    settings = load_settings(tmp_path, {}, run="demo", checkpoints=tmp_path)
    free, said = iter([1 << 10, 1 << 10, 1 << 40]), []
    last = [0]

    def free_bytes(path):
        last[0] = next(free, last[0])
        return last[0]

    monkeypatch.setattr(restarts, "free_bytes", free_bytes)
    monkeypatch.setattr(restarts.time, "sleep", lambda seconds: None)
    settings.paths.run_dir.mkdir(parents=True)
    assert restarts._wait_for_room(settings, (), said.append) and len(said) == 1
    monkeypatch.setattr(restarts, "free_bytes", lambda path: 1 << 10)
    monkeypatch.setattr(restarts, "ROOM_SECONDS", 0.0)
    assert not restarts._wait_for_room(settings, (), said.append)


def test_a_job_that_was_requeued_by_hand_goes_on(driver, monkeypatch):
    """`scontrol requeue` sends TERM, as a person who stops the job does; but then the job starts again."""
    for restart in ("0", "1"):
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        monkeypatch.setenv("SLURM_RESTART_COUNT", restart)
        with JournalWriter(driver.paths) as writer:
            environment = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "0"}
            writer.write(LaunchStart(host=f"n{restart}", chain="slurm-7", environment=environment), launch=1 + int(restart))
            writer.write(LaunchEnd(host=f"n{restart}", cause="stopped by a person", because="SIGTERM"), launch=1 + int(restart))
        settings = load_settings(driver.directory, {}, run="demo")
        settled = restarts.settle_launch(settings, "slurm-7", POLICY, lambda line: None)
        assert settled.decision.verdict is (Verdict.NEW_JOB if restart == "1" else Verdict.STOP)
    assert "requeued" in settled.decision.reason


def test_every_cause_has_a_rule():
    assert set(RULES) == set(EndCause)


def test_the_documented_table_is_the_policy():
    page = (ROOT / "docs/launching.md").read_text()
    for cause, rule in RULES.items():
        row = next(line for line in page.split("## Going on by itself")[1].splitlines() if line.startswith(f"| {cause.value}"))
        assert {Verdict.HERE: "again, here", Verdict.NEW_JOB: "again, in a new job", Verdict.STOP: "stop"}.get(
            rule.verdict, "finished"
        ) in row, cause


def test_the_batch_script_asks_chronicle_and_expands_variables():
    command = ["torchrun", "--rdzv-endpoint", "$HEAD:29400", "it's.py"]
    script = format_sbatch("a run", command, grace_seconds=60, nodes=2, again=("--restarts", "5"))
    assert '"$HEAD:29400"' in script and "'it'\"'\"'s.py'" in script
    assert 'chronicle again --requeue --run "$run"' in script and "--kill-on-bad-exit=0 --wait=0" in script


def test_a_node_ends_a_minute_after_a_peer_failed_and_after_its_grace_where_the_peer_was_told_to_stop(tmp_path):
    """`srun` ends no task for another's end, so that each finishes its save; a healthy peer's end is no reason."""
    now = [100.0]
    first = Peers(tmp_path, 0, 30.0, clock=lambda: now[0])
    Peers(tmp_path, 1, 30.0).tell({"host": "n1", "exit_code": 0, "cause": "finished"})
    assert not first.have_failed()
    Peers(tmp_path, 1, 30.0).tell({"host": "n1", "stopped_by": "signal", "cause": "preempted", "because": "SIGUSR1"})
    waits = []
    while not first.have_failed():
        now[0] += 5.0
        waits.append(now[0])
    assert 90.0 <= waits[-1] - 105.0 <= 95.0
    assert first.said == "node n1 ended: preempted (SIGUSR1)"
    crashed = Peers(tmp_path, 2, 30.0, clock=lambda: now[0])
    (tmp_path / ".ended-node1.json").unlink()
    Peers(tmp_path, 3, 30.0).tell({"host": "n3", "cause": "crash", "because": "rank 3"})
    begin = now[0]
    while not crashed.have_failed():
        now[0] += 5.0
    assert 60.0 <= now[0] - begin <= 65.0


@pytest.mark.parametrize("why", [Why.SPOILT, Why.UNREADABLE])
def test_what_a_person_has_to_choose_is_refused_and_nothing_is_moved(tmp_path, monkeypatch, why):
    """Whole weights that hold NaN, and a storage that fails, are no half-written save."""
    path = tmp_path / "checkpoints" / "step-8.pt"
    path.parent.mkdir()
    path.write_bytes(b"x")
    over = PassedOver(SimpleNamespace(path=path, step=8), "as it is", why)
    found = Latest(SimpleNamespace(path=tmp_path / "checkpoints/step-4.pt", step=4), True, (over,))
    monkeypatch.setattr(handover, "find_latest", lambda *_, **__: found)
    settings = load_settings(tmp_path, {}, run="demo")
    with JournalWriter(settings.paths) as writer:
        writer.append("launch.start", launch=1, data={"host": "h"})
    with pytest.raises(NotResumable, match=r"step-8\.pt"):
        handover.hand_over(settings, say=lambda line: None)
    assert path.exists()


def test_tasks_of_an_array_that_share_a_directory_are_handed_nothing(tmp_path, monkeypatch):
    """A checkpoint without an identity may be another task's. A run of another name there is not this array's."""
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    settings = load_settings(tmp_path, {}, run="demo-1", checkpoints=tmp_path / "checkpoints")
    (tmp_path / "checkpoints").mkdir()
    for name in ("demo-1", "demo-x"):
        with JournalWriter(load_settings(tmp_path, {}, run=name).paths) as writer:
            writer.append("launch.start", launch=1, data={"host": "h"})
    assert handover.hand_over(settings, say=lambda line: None).path == ""
    (settings.paths.run_dir.parent / "demo-x").rename(settings.paths.run_dir.parent / "demo-0")
    place = settings.paths.run_dir.parent / "demo-0" / "run.json"
    roots = [{"path": str(tmp_path / "checkpoints"), "from_run": "../../checkpoints"}]
    place.write_text(json.dumps(json.loads(place.read_text()) | {"roots": roots}))
    with pytest.raises(NotResumable, match="run `demo-0` saves into"):
        handover.hand_over(settings, say=lambda line: None)


def test_a_mount_point_is_named_before_the_first_launch_and_where_a_cut_save_lies_in_it(tmp_path, monkeypatch):
    """Nothing can be renamed out of it; a run that nobody watches would stop there in the night."""
    root = tmp_path / "checkpoints"
    root.mkdir()
    (root / "step-8.pt").write_bytes(b"cut")
    newest = SimpleNamespace(path=root / "step-4.pt", step=4)
    over = PassedOver(SimpleNamespace(path=root / "step-8.pt", step=8), "half of it is missing", Why.UNSOUND)
    monkeypatch.setattr(handover, "find_latest", lambda *_, **__: Latest(newest, True, (over,)))
    monkeypatch.setattr(handover, "find_remnants", lambda *_: {})
    for module in (handover, restarts):
        monkeypatch.setattr(module, "is_mount_point", lambda path: Path(path) == root)
    settings = load_settings(tmp_path, {}, run="demo", checkpoints=root)
    with JournalWriter(settings.paths) as writer:
        writer.append("launch.start", launch=1, data={"host": "h"})
    with pytest.raises(NotResumable, match=r"step-8\.pt.*moved aside.*mount point") as refused:
        handover.hand_over(settings, say=lambda line: None)
    assert "move it away yourself" in (refused.value.remedy or "") and (root / "step-8.pt").exists()
    said = []
    run = restarts.Unattended(settings=settings, chain="run-1", policy=POLICY, grace_seconds=1.0, say=said.append)
    restarts._look_before(run)
    assert len(said) == 1 and "is a mount point" in said[0]


def test_a_job_that_is_given_excluded_nodes_again_and_again_stops(driver, monkeypatch):
    """Without a launch nothing counts against the budget: it would go round for ever."""
    node = host_name()
    with JournalWriter(driver.paths) as writer:
        writer.append("hardware", data={"host": node, "action": "exclude-node", "reason": "Xid 64"})
    (driver.directory / "scontrol").write_text(f"#!/bin/sh\n[ $2 = hostnames ] && echo {node}\n[ $2 = hostnames ]\n")
    (driver.directory / "scontrol").chmod(0o755)
    driver.environ |= {"PATH": f"{driver.directory}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": node}
    early = driver.environ | {"SLURM_RESTART_COUNT": "3"}
    late = driver.environ | {"SLURM_RESTART_COUNT": "9"}
    answers = []
    for environ in (early, late):
        driver.environ = environ
        answers.append(driver.call("again"))
    assert [one.returncode for one in answers] == [75, 78]
    assert "10 times in a row" in answers[1].stdout and "--readmit" in answers[1].stdout


def test_the_most_telling_cause_of_several_nodes_counts():
    ends = [LaunchEnd(host="n1", cause="crash", because="connection closed"), LaunchEnd(host="n2", cause="out of memory")]
    assert restarts._cause_of(ends) is EndCause.OUT_OF_MEMORY


def test_status_and_costs_name_the_node_that_was_lost_not_the_crash_that_it_caused(driver):
    """Its supervisor writes nothing; the end that the next start infers for it says more than the peer's."""
    with JournalWriter(driver.paths) as writer:
        for host in ("n1", "n2"):
            writer.write(LaunchStart(host=host), launch=1)
        writer.write(LaunchEnd(host="n1", exit_code=1, cause="crash", because="connection closed"), launch=1)
        lost = LaunchEnd(host="n2", inferred=True, cause="node lost", because="SLURM says that node n2 is DOWN")
        writer.write(lost, launch=1)
    status = driver.call("status").stdout
    assert "ended with code 1: node lost" in status and "n2 is DOWN" in status
    told = json.loads(driver.call("costs", "--json").stdout)
    assert [one["cause"] for one in told["interruptions"]] == ["node lost"]


# --- a trainer that resumes from what it is handed, saves every second step, and has an accident in each launch

TRAINER = """
import json, os, re, shutil, sys
os.makedirs("ck", exist_ok=True)
launch = int(os.environ["CHRONICLE_LAUNCH"])
step = int(os.environ.get("CHRONICLE_RESUME_STEP") or 0)
handed = os.environ.get("CHRONICLE_RESUME_FROM")
assert (handed is None) == (step == 0) and (handed is None or handed.endswith(f"step-{step}.pt"))
print("launch", launch, "starts at", step, flush=True)
accident = json.loads(os.environ["ACCIDENTS"]).get(str(launch), [0, ""])
while step < 12:
    step += 1
    if step == accident[0]:
        exec(accident[1])
    if step % 2 == 0:
        shutil.copy(f"made/step-{step}.pt", "ck")
"""
CUT = "shutil.copy(f'made/step-{step}.pt', 'ck'); os.truncate(f'ck/step-{step}.pt', 300); os.kill(os.getpid(), 9)"
KILL = "os.kill(os.getpid(), 9)"


@pytest.fixture
def driver(driver):
    """With a trainer, and real checkpoints that it only has to put into their place: no launch imports torch."""
    (driver.directory / "train.py").write_text(TRAINER)
    (driver.directory / "made").mkdir()
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(1, 13):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, driver.directory / "made" / f"step-{step}.pt")
    return driver


def train(driver, accidents, *options, restarts="4"):
    environ = {"ACCIDENTS": json.dumps(accidents)}
    options = ("--restarts", restarts, "--restart-pause", "0.1", "--checkpoints", "ck", *options)
    driver.start([sys.executable, "train.py"], *options, environ=environ)
    return driver.wait(300)


def starts(driver):
    printed = driver.out.read_text()
    return [int(line.rsplit(" ", 1)[1]) for line in printed.splitlines() if line.startswith("launch") and "starts at" in line]


def decisions(driver):
    return [entry.data["decision"] for entry in driver.entries("restart")]


def test_kills_in_steps_and_in_a_save_go_on_from_the_newest_verified_checkpoint(driver):
    """Each attempt is a launch of its own; the cut save is out of the loader's sight, and comes back by command."""
    assert train(driver, {"1": [5, KILL], "2": [8, CUT]}) == 0
    assert starts(driver) == [0, 4, 6]
    assert decisions(driver) == ["again", "again", "ended"]
    assert [entry.data["cause"] for entry in driver.entries("launch.end")] == ["crash", "crash", "ended"]
    assert [entry.data.get("handed", {}).get("step") for entry in driver.entries("launch.start")] == [None, 4, 6]
    moved = driver.entries("quarantine")
    assert [move["path"] for move in moved[0].data["moves"]] == ["step-8.pt"]
    kept = driver.directory / "quarantine" / moved[0].id / "step-8.pt"
    assert kept.stat().st_size == 300
    os.rename(driver.directory / "ck/step-8.pt", driver.directory / "ck/later")  # the name is taken again
    assert driver.call("undo", moved[0].id, "--yes", "--checkpoints", "ck").returncode == 0
    assert (driver.directory / "ck/step-8.pt").stat().st_size == 300


def test_checkpoints_in_the_usual_directory_need_no_option(driver):
    """It was not there when the first launch began, and nobody named it."""
    trainer = driver.directory / "train.py"
    trainer.write_text(trainer.read_text().replace('"ck"', '"checkpoints"'))
    environ = {"ACCIDENTS": json.dumps({"1": [5, KILL]})}
    driver.start([sys.executable, "train.py"], "--restarts", "2", "--restart-pause", "0.1", environ=environ)
    assert driver.wait(300) == 0
    assert starts(driver) == [0, 4]


def test_a_new_run_is_handed_nothing_that_lies_there(driver):
    """Whose those checkpoints are is not known, and a cut one may be a save of another run that is alive."""
    there = driver.directory / "ck"
    there.mkdir()
    for step in (8, 10):
        shutil.copy(driver.directory / "made" / f"step-{step}.pt", there)
    (there / "step-11.pt").write_bytes(b"cut")
    assert train(driver, {"1": [1, ""]}, restarts="1") == 0
    assert starts(driver) == [0] and not driver.entries("quarantine") and (there / "step-11.pt").read_bytes() == b"cut"


def test_a_checkpoint_that_says_it_is_another_runs_is_not_the_latest(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        assert chronicle(["init", "--run", name]) == 0
        monkeypatch.setenv("CHRONICLE_LAUNCH", "1")
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        run = attach(tmp_path / "logs" / name, model, optimizer)
        assert run is not None
        for _ in range({"a": 9, "b": 5}[name]):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        (tmp_path / "checkpoints").mkdir(exist_ok=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, tmp_path / "checkpoints" / f"step-{5 if name == 'b' else 9}.pt")
    capsys.readouterr()
    assert chronicle(["latest", "--run", "b"]) == 0
    found = capsys.readouterr()
    assert "step-5.pt" in found.out and "run `a` saved it" in found.out + found.err
    assert chronicle(["latest", "--run", "a"]) == 0
    assert "step-9.pt" in capsys.readouterr().out


def test_a_crash_without_progress_stops_with_a_sentence(driver):
    """Progress is a newer verified checkpoint, not time: three launches that never save are enough."""
    crash = [5, "raise KeyError('loss')"]
    assert train(driver, {str(number): crash for number in range(1, 9)}, restarts="9") == 1
    assert decisions(driver) == ["again", "again", "again", "stop"]  # the first one saved step 4
    assert [entry.data["progress"] for entry in driver.entries("restart")] == [True, False, False, False]
    assert "no newer verified checkpoint in 3 launches in a row" in driver.out.read_text()
    status = driver.call("status").stdout
    assert "KeyError: 'loss'" in status and "restarts    stop: crash, and no newer verified checkpoint" in status


def test_the_budget_is_never_exceeded_even_with_progress(driver):
    accidents = {str(number): [2 * number + 1, KILL] for number in range(1, 9)}
    assert train(driver, accidents, restarts="2") == 137
    assert len(driver.entries("launch.start")) == 3
    assert "budget of 2 restarts is used up" in driver.out.read_text()


@pytest.mark.parametrize(
    "accident, cause",
    [("sys.exit(78)", "refused"), ("sys.exit('torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB')", "out of memory")],
)
def test_what_would_happen_again_stops(driver, accident, cause):
    assert train(driver, {"1": [3, accident]}) in (1, 78)
    assert decisions(driver) == ["stop"]
    assert driver.entries("restart")[0].data["cause"] == cause


def test_nothing_is_trained_from_scratch_where_no_checkpoint_passes(driver):
    """All saves were completed once and are damaged now: a person has to choose."""
    assert train(driver, {"1": [5, KILL]}, restarts="0") == 137
    for path in (driver.directory / "ck").iterdir():
        os.truncate(path, 300)
    assert train(driver, {}) == 78
    assert len(driver.entries("launch.start")) == 1
    assert sorted(path.name for path in (driver.directory / "ck").iterdir()) == ["step-2.pt", "step-4.pt"]


def test_a_checkpoint_with_nan_is_handed_to_nobody(driver):
    """It is whole, so nothing is moved: a person has to choose. No guard and no manifest says it, the bytes do."""
    path = driver.directory / "made" / "step-4.pt"
    state = torch.load(path)
    state["model"]["weight"][1, 2] = float("nan")
    torch.save(state, path)
    assert train(driver, {"1": [5, KILL]}) == 78
    assert starts(driver) == [0] and (driver.directory / "ck" / "step-4.pt").exists()
    assert "is poisoned: F11 step-4.pt: `model.weight` holds NaN" in driver.out.read_text()
    latest = driver.call("latest", "--verified", "--checkpoints", "ck")
    assert latest.stdout.strip().endswith("step-2.pt") and "holds NaN" in latest.stdout + latest.stderr


EARLY = "sys.exit(0)"


def test_an_end_before_the_last_planned_step_is_no_end_of_the_run(driver):
    """Code 0 says that nothing failed, not that everything was done."""
    trainer = driver.directory / "train.py"
    logging = "    print(f'step {step} loss 1', flush=True)\n"
    trainer.write_text(trainer.read_text().replace("    if step % 2", logging + "    if step % 2"))
    environ = {"ACCIDENTS": json.dumps({"1": [5, EARLY]})}
    options = ("--restarts", "4", "--restart-pause", "0.1", "--checkpoints", "ck")
    driver.start([sys.executable, "train.py", "--max_steps", "12"], *options, environ=environ)
    assert driver.wait(300) == 0 and starts(driver) == [0, 4]
    ends = [(end.data["cause"], end.data["because"]) for end in driver.entries("launch.end")]
    assert ends == [("ended early", "ended with code 0 after 4 of 12 planned steps"),
                    ("finished", "the launcher ended with 0 at step 12 of 12")]  # fmt: skip
    driver.start([sys.executable, "train.py", "--max_steps", "16"], environ={"ACCIDENTS": json.dumps({"3": [1, EARLY]})})
    assert driver.wait() == 0
    assert driver.entries("launch.end")[-1].data["because"] == "ended with code 0 after 0 of 4 planned steps"


def test_a_guarded_launch_that_took_no_step_has_not_finished(driver):
    """A checkpoint at the end of an epoch: the resume's loader is empty, and the script ends with 0."""
    script = "import torch, chronicle; m = torch.nn.Linear(1, 1); o = torch.optim.SGD(m.parameters()); "
    script += "run = chronicle.attach('logs/demo', m, o)"
    driver.start([sys.executable, "-c", script])
    assert driver.wait() == 0
    assert driver.entries("launch.end")[0].data["because"].startswith("ended with code 0 and took no step")


def test_a_daemon_that_is_killed_behind_its_launcher_did_not_finish(driver):
    daemon = "import os, time; os.setsid(); time.sleep(0.5); os.kill(os.getpid(), 9)"
    script = f"import subprocess, sys, time; subprocess.Popen(['sh', '-c', '{sys.executable} -c \"{daemon}\" & exit']).wait()"
    driver.start([sys.executable, "-c", script + "; time.sleep(1.5)"])
    assert driver.wait() == 0
    assert driver.entries("launch.end")[-1].data["cause"] == "crash"
    assert "was ended by SIGKILL; the launcher ended with 0" in driver.entries("launch.end")[-1].data["because"]


GONE = {"removed": shutil.rmtree, "emptied": lambda path: [one.unlink() for one in path.iterdir()]}


@pytest.mark.parametrize("how", GONE)
@pytest.mark.parametrize("options", [(), ("--restarts", "2", "--restart-pause", "0.1"), ("--sbatch", "2")])
def test_a_run_whose_checkpoints_are_gone_does_not_begin_from_scratch(driver, how, options):
    """A disk that is not mounted is no wish to begin again; where it is one, the reason is recorded, once."""
    assert train(driver, {"1": [5, KILL]}, restarts="0") == 137
    GONE[how](driver.directory / "ck")
    driver.start([sys.executable, "train.py"], "--checkpoints", "ck", *options, environ={"ACCIDENTS": "{}"})
    assert driver.wait(300) == 78 and len(driver.entries("launch.start")) == 1
    assert "2 saves were completed (the last one `step-4.pt`) and none can be found" in driver.out.read_text()
    assert "--force" in driver.out.read_text() and "--checkpoints DIR" in driver.out.read_text()


def test_checkpoints_that_vanish_between_two_launches_stop_the_run(driver):
    assert train(driver, {"1": [5, f"shutil.rmtree('ck'); {KILL}"], "2": [5, KILL]}, restarts="0") == 137  # none was recorded
    assert train(driver, {"2": [5, KILL], "3": [8, f"shutil.rmtree('ck'); {KILL}"]}) == 78
    assert starts(driver) == [0, 0, 4]


def test_a_launch_that_was_forced_to_begin_from_scratch_may_fail_before_its_first_save(driver):
    assert train(driver, {"1": [5, KILL]}, restarts="0") == 137
    shutil.rmtree(driver.directory / "ck")
    assert train(driver, {"2": [1, KILL]}, "--force", "the old disk is dead") == 0
    assert starts(driver) == [0, 0, 0]
    assert [one.data.get("fresh") for one in driver.entries("launch.start")] == [None, "the old disk is dead", None]


def test_a_save_without_a_guard_is_told_when_it_stands_still(driver):
    """What is being written still changes, and nothing is listed again while no name is new."""
    root = driver.directory / "ck"
    root.mkdir()
    watch = SaveWatch(lambda: [str(root)], lambda: (), "R")
    made = (driver.directory / "made" / "step-2.pt").read_bytes()
    (root / "step-2.pt").write_bytes(made[:300])
    assert watch.look() == []
    (root / "step-2.pt").write_bytes(made)
    assert watch.look() == []
    assert [(step, Path(seen.path).name, seen.run_id) for step, seen in watch.look()] == [(2, "step-2.pt", "R")]
    assert watch.look() == []


def test_a_pointer_that_names_a_cut_save_names_the_newest_verified_one_and_comes_back(driver):
    """Loaders of some layouts read `latest` and nothing else."""
    assert train(driver, {"1": [5, KILL]}, restarts="0") == 137
    checkpoints = driver.directory / "ck"
    torch.save({"step": 6}, checkpoints / "step-6.pt")
    os.truncate(checkpoints / "step-6.pt", 100)
    (checkpoints / "latest").write_text("step-6.pt\n")
    os.symlink("step-6.pt", checkpoints / "newest")
    assert train(driver, {}) == 0
    assert starts(driver)[-1] == 4
    assert (checkpoints / "latest").read_text() == "step-4.pt\n"
    assert os.readlink(checkpoints / "newest") == "step-4.pt"
    (checkpoints / "step-6.pt").unlink()
    moved = driver.entries("quarantine")[0]
    assert driver.call("undo", moved.id, "--yes", "--checkpoints", "ck").returncode == 0
    assert (checkpoints / "latest").read_text() == "step-6.pt\n"
    assert os.readlink(checkpoints / "newest") == "step-6.pt"

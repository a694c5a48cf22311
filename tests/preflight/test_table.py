"""The whole catalogue as one table: each of PF01 to PF31 has a passing, a not passing and an unknown case, with what was
read and the way out. Checks of the host read real files, ports, processes and programs."""

import os
import subprocess
import sys
import zipfile
from dataclasses import replace

import pytest
import torch

from chronicle.journal import JournalWriter, read_journal
from chronicle.launch.processes import read_boot_id
from chronicle.paths import RunPaths
from chronicle.preflight import CheckVerdict, TrainerFacts, check_facts
from chronicle.preflight.gate import CHECK_IDS
from chronicle.preflight.host import Host, check_host
from tests.preflight.test_catalogue import BROKEN, EXPECTED, GOOD

FAIL, WARN, PASS = CheckVerdict.FAIL, CheckVerdict.WARN, CheckVerdict.PASS
UNKNOWN, SKIPPED = CheckVerdict.UNKNOWN, CheckVerdict.SKIPPED
FAILING = {check: changed for check, _, changed, _ in BROKEN[::-1]} | {
    "PF02": {"params_counted": 771},
    "PF06": {"params_logical": 140},
    "PF11": {"scheduler_horizon": 2000},
    "PF19": {"ranks": tuple(replace(one, first_batch_digest="a") for one in GOOD.ranks)},
    "PF01": {"num_data_shards": 1},
}
HOST_ONLY = ("PF07", "PF08", "PF30", "PF31")


def host(tmp_path, **changed):
    paths = RunPaths(tmp_path / "logs" / "demo")
    base = {"paths": paths, "checkpoints_dir": None, "entries": (), "environ": {"PATH": "/nowhere"}}
    return Host(**base | changed)


def told(check, the_host):
    return next(one for one in check_host(the_host) if one.check == check)


def program(directory, name, text):
    directory.mkdir(exist_ok=True)
    path = directory / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def journalled(tmp_path, kind, launch=None, **data):
    paths = RunPaths(tmp_path / "logs" / "demo")
    with JournalWriter(paths) as writer:
        writer.append(kind, launch=launch, data=data)
    return {"paths": paths, "entries": read_journal(paths).entries}


@pytest.mark.parametrize("check", [name for name in CHECK_IDS if name not in HOST_ONLY])
def test_facts_checks_pass_fail_and_stay_unknown_with_reading_and_remedy(check):
    good = next(one for one in check_facts(GOOD, EXPECTED) if one.check == check)
    assert good.verdict is PASS, good
    nothing = next(one for one in check_facts(TrainerFacts()) if one.check == check)
    assert nothing.verdict is UNKNOWN and nothing.message
    bad = next(one for one in check_facts(replace(GOOD, **FAILING[check]), EXPECTED) if one.check == check)
    assert bad.verdict in (FAIL, WARN, SKIPPED), bad
    if bad.verdict is not SKIPPED:
        assert bad.remedy and bad.read, bad
        assert good.read, good


def test_pf07_processes_of_an_earlier_launch(tmp_path):
    token = "b" * 32
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env={"CHRONICLE_TOKEN": token})
    try:
        start = {"host": "h", "token": token, "pid": 2**22 - 1, "start_ticks": 1, "boot_id": read_boot_id()}
        known = journalled(tmp_path, "launch.start", launch=1, **start)
        found = told("PF07", host(tmp_path, **known))
        assert found.verdict is FAIL and str(sleeper.pid) in found.message and "sweep" in found.remedy
    finally:
        sleeper.kill()
        sleeper.wait()
    assert told("PF07", host(tmp_path, **known)).verdict is PASS


def test_pf08_memory_of_gpus_by_the_text_of_nvidia_smi(tmp_path):
    bin_dir = tmp_path / "bin"
    program(bin_dir, "nvidia-smi", "echo '0, GPU-aa, 17'; echo '1, GPU-bb, 40000'")
    environ = {"PATH": f"{bin_dir}:/usr/bin:/bin"}
    before, os.environ["PATH"] = os.environ["PATH"], environ["PATH"]
    try:
        assert "GPU-bb: 40000 MiB" in told("PF08", host(tmp_path, environ=environ)).message
        assert told("PF08", host(tmp_path, environ=environ | {"CUDA_VISIBLE_DEVICES": "0"})).verdict is PASS
        program(bin_dir, "nvidia-smi", "sleep 30")
        found = told("PF08", host(tmp_path, environ=environ))
        assert found.verdict is UNKNOWN and "did not answer" in found.message
    finally:
        os.environ["PATH"] = before
    assert told("PF08", host(tmp_path)).verdict in (PASS, UNKNOWN)  # no driver: no GPU at all, or one that cannot be asked


def test_pf21_pf30_room_and_strays_beside_real_checkpoints(tmp_path, monkeypatch):
    checkpoints = tmp_path / "checkpoints"
    assert told("PF21", host(tmp_path, checkpoints_dir=checkpoints)).verdict is UNKNOWN
    assert told("PF30", host(tmp_path, checkpoints_dir=checkpoints)).verdict is UNKNOWN
    state = checkpoints / "opt_step-5" / "accelerator_state"
    state.mkdir(parents=True)
    (state / "model.safetensors").write_bytes(b"x" * 100)
    assert told("PF21", host(tmp_path, checkpoints_dir=checkpoints)).verdict is PASS
    assert told("PF30", host(tmp_path, checkpoints_dir=checkpoints)).verdict is PASS
    (checkpoints / "opt_step-10").mkdir()
    cut = told("PF30", host(tmp_path, checkpoints_dir=checkpoints))
    assert cut.verdict is WARN and "`opt_step-10`: a save that was cut" in cut.message
    with monkeypatch.context() as broken:
        broken.setattr("rollback.checks.remnants.find_remnants", lambda *_: (_ for _ in ()).throw(OSError("the disk is gone")))
        unread = told("PF30", host(tmp_path, checkpoints_dir=checkpoints))
    assert unread.verdict is UNKNOWN and "the disk is gone" in unread.message
    torch.save({"step": torch.tensor(5)}, state / "custom_checkpoint_0.pkl.orig")
    found = told("PF30", host(tmp_path, checkpoints_dir=checkpoints))
    assert found.verdict is FAIL and "custom_checkpoint_0.pkl.orig" in found.message
    with open(state / "model.safetensors", "wb") as huge:
        huge.truncate(1 << 43)  # sparse: 8 TiB by size
    assert told("PF21", host(tmp_path, checkpoints_dir=checkpoints)).verdict is FAIL


OWN = ("6.hyps", "checkpoint_100_steps.zip", "step_100.npz", "step_100.msgpack", "step-100.h5", "step_100.log")


def test_pf30_what_the_trainer_writes_there_itself_stops_no_launch(tmp_path):
    """Texts, and saves that no reader of ours takes: an archive of arrays is a zip, and no file of torch."""
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    torch.save({"step": 6, "model": {"w": torch.ones(2)}}, checkpoints / "6.ckpt")
    for name in OWN:
        (checkpoints / name).write_text("x\n")
    with zipfile.ZipFile(checkpoints / "checkpoint_100_steps.zip", "w") as archive:
        archive.writestr("data", "{}")
        archive.write(checkpoints / "6.ckpt", "policy.pth")
    found = told("PF30", host(tmp_path, checkpoints_dir=checkpoints))
    assert found.verdict is PASS and "no state in" in found.message


@pytest.mark.parametrize("bytes_kept", [None, 300])
def test_pf30_a_copy_and_a_cut_copy_of_state_are_refused_whatever_they_are_called(tmp_path, bytes_kept):
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    torch.save({"step": 6, "model": {"w": torch.ones(2)}}, checkpoints / "step-6.pt")
    whole = (checkpoints / "step-6.pt").read_bytes()
    for name in ("step-6.pt.orig", "step-8.hyps", "step-8.pt.tmp"):
        (checkpoints / name).write_bytes(whole[:bytes_kept])
        found = told("PF30", host(tmp_path, checkpoints_dir=checkpoints))
        assert found.verdict is FAIL and name in found.message
        (checkpoints / name).unlink()


def test_pf23_save_time_against_grace_and_against_a_schedulers_warning(tmp_path):
    known = journalled(tmp_path, "checkpoint", path="x", save_seconds=47.0)
    assert told("PF23", host(tmp_path, **known, grace_seconds=30.0)).message == "save 47 s, killed after 30 s"
    assert told("PF23", host(tmp_path, **known, grace_seconds=90.0)).verdict is PASS
    late = told("PF23", host(tmp_path, **known, grace_seconds=90.0, environ={"CHRONICLE_SIGNAL_LEAD": "40"}))
    assert late.verdict is FAIL and "--sbatch" in late.remedy
    assert told("PF23", host(tmp_path, grace_seconds=90.0)).verdict is UNKNOWN


def test_pf31_a_command_that_cannot_start_is_a_warning(tmp_path, monkeypatch):
    program(tmp_path / "bin", "torchrun", "exit 0")
    monkeypatch.chdir(tmp_path)
    here = {"environ": {"PATH": str(tmp_path / "bin")}}
    assert told("PF31", host(tmp_path, **here)).verdict is UNKNOWN
    assert told("PF31", host(tmp_path, **here, command=("nope", "train.py"))).message == "`nope` is not on the PATH here"
    command = ("torchrun", "--nproc_per_node", "2", "train.py")
    assert "`train.py` is not in" in told("PF31", host(tmp_path, **here, command=command)).message
    (tmp_path / "train.py").touch()
    assert told("PF31", host(tmp_path, **here, command=command)).verdict is PASS


def test_every_check_of_the_catalogue_is_in_one_of_the_two_places(tmp_path):
    answered = {one.check for one in (*check_facts(GOOD, EXPECTED), *check_host(host(tmp_path)))}
    assert answered == set(CHECK_IDS)
    assert set(FAILING) | set(HOST_ONLY) == set(CHECK_IDS)

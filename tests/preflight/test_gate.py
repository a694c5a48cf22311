"""Inside the ranks and on the command line: a failed check refuses, a plan is declared once and changed only aloud."""

import json
import os
import sys

import pytest

from chronicle.cli.main import run as chronicle
from chronicle.journal import JournalWriter, read_journal
from chronicle.journal.events import PlanDeclared
from chronicle.launch.admission import LaunchRefused
from chronicle.paths import RunPaths
from chronicle.preflight import PreflightFailed, RankFacts, TrainerFacts, check_before_first_step
from chronicle.preflight.facts import declare_plan
from chronicle.preflight.gate import CHECK_IDS
from chronicle.preflight.host import Host, check_host

RANKS = (RankFacts(rank=0, host="h", pid=1, device="cpu-0"),)
FACTS = TrainerFacts(config={"d_model": 512}, params_logical=100, params_counted=100, ranks=RANKS)
SMALLER = TrainerFacts(config={"d_model": 128}, params_logical=14, params_counted=14, ranks=RANKS)


@pytest.fixture
def paths(tmp_path):
    return RunPaths(tmp_path / "logs" / "demo")


def environ(paths, launch=1, **more):
    return {"CHRONICLE_RUN_DIR": str(paths.run_dir), "CHRONICLE_LAUNCH": str(launch), **more}


def plans(paths):
    return [entry.data["declared"]["params"] for entry in read_journal(paths).of_kind("plan")]


def test_first_launch_declares_the_plan_and_a_silent_change_is_refused(paths):
    """Seed 000: 1.21B became 771M overnight, and nobody said so."""
    check_before_first_step(FACTS, environ=environ(paths))
    check_before_first_step(FACTS, environ=environ(paths, 2))
    assert plans(paths) == [100]
    with pytest.raises(PreflightFailed, match="86% smaller") as refused:
        check_before_first_step(SMALLER, environ=environ(paths, 3))
    assert refused.value.exit_code == 78
    assert plans(paths) == [100]
    last = list(read_journal(paths).of_kind("preflight"))[-1]
    assert last.data["verdict"] == "failed"


def test_accepted_change_becomes_the_plan_with_its_reason(paths):
    check_before_first_step(FACTS, environ=environ(paths))
    check_before_first_step(SMALLER, environ=environ(paths, 2, CHRONICLE_ACCEPT_CHANGE="debugging"))
    assert plans(paths) == [100, 14]
    assert list(read_journal(paths).of_kind("plan"))[-1].data["reason"] == "debugging"
    check_before_first_step(SMALLER, environ=environ(paths, 3))


def test_a_plan_that_the_training_changed_later_does_not_bind_a_launch_from_before(paths):
    """A growth at step 6, a kill before the next save: the next launch begins at step 4, with the small model."""
    check_before_first_step(SMALLER, environ=environ(paths), start_step=0)
    with JournalWriter(paths) as writer:
        writer.write(PlanDeclared(declared=declare_plan(FACTS), reason="growth"), step=6, launch=1, title="grown")
    check_before_first_step(SMALLER, environ=environ(paths, 2), start_step=4)
    check_before_first_step(FACTS, environ=environ(paths, 2), start_step=6)
    with pytest.raises(PreflightFailed, match="86% smaller"):
        check_before_first_step(SMALLER, environ=environ(paths, 3), start_step=8)


def test_without_chronicle_run_a_failure_is_refused_all_the_same():
    with pytest.raises(PreflightFailed, match="PF01"):
        check_before_first_step(TrainerFacts(ranks=RANKS * 4, num_data_shards=2, num_workers=4), environ={})


def check_of(name, host):
    return next(one for one in check_host(host) if one.check == name)


def test_save_time_of_the_journal_is_held_against_the_grace(paths):
    with JournalWriter(paths) as writer:
        writer.append("checkpoint", step=5, data={"path": "x", "save_seconds": 47.0})
    entries = read_journal(paths).entries
    host = Host(paths=paths, checkpoints_dir=None, entries=entries, environ={}, grace_seconds=30.0)
    assert check_of("PF23", host).message == "save 47 s, killed after 30 s"


def test_command_reads_facts_and_claim_and_exits_3_on_a_failure(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "facts.json").write_text(json.dumps(FACTS.to_json()))
    words = ["preflight", "--run", "demo", "--facts", "facts.json", "--json"]
    assert chronicle(words) == 0
    assert chronicle([*words, "--params", "1.21B", "--devices", "1"]) == 3
    shown = capsys.readouterr().out
    checks = json.loads(shown[shown.rindex('{\n  "checks"') :])["checks"]
    failed = [one["check"] for one in checks if one["verdict"] == "fail"]
    assert failed == ["PF02"]
    assert [one["check"] for one in checks] == list(CHECK_IDS)


def test_the_page_lists_what_was_read_and_names_the_rest_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "facts.json").write_text(json.dumps(FACTS.to_json()))
    assert chronicle(["preflight", "--run", "demo", "--facts", "facts.json"]) == 0
    *rows, rest, _counts = capsys.readouterr().out.splitlines()
    assert rows and all(" unknown " not in row for row in rows) and any(row.startswith("PF03  pass") for row in rows)
    assert rest.startswith("not checked: data shards for every reader, parameter count against the claim")
    assert "three parameter counts agree" not in rest


def test_run_refuses_on_a_failed_check_and_skip_is_journalled(tmp_path, monkeypatch):
    (tmp_path / "checkpoints" / "opt_step-5" / "accelerator_state").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    from chronicle.cli.run import _check_before
    from chronicle.settings import load_settings

    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nprintf '0, GPU-a, 23000\\n'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    settings = load_settings(tmp_path, {}, run="demo")
    with pytest.raises(LaunchRefused, match="PF08"):
        _check_before(settings, (sys.executable,), None, (), None)
    _, recorded = _check_before(settings, (sys.executable,), None, ("PF08",), None)
    assert recorded["skipped"] == ["PF08"] and recorded["preflight"]["PF08"] == "skipped"

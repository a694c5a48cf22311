"""A study of a trainer that knows no studies: what is refused, what a launch is told, state lost in a copy, and the whole."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from chronicle.journal import read_journal
from chronicle.journal.events import EntryKind, GuardVerdict, events_of
from chronicle.metrics.log import MetricsWriter, read_metrics
from experiments.command import format_study_plan
from experiments.definition import parse_study
from experiments.design import START, StudyPlan, plan_study
from experiments.errors import BadStudy, StudyError
from experiments.files import StudyPaths
from experiments.gates import check_gates, find_treatment
from experiments.launches import LegLaunch, digest_checkpoint
from experiments.outcomes import read_study
from experiments.report import build_report
from experiments.runner import read_registered

STRANGERS = Path(__file__).parent / "strangers"
CHAR = """
v: 1
name: char
title: What does a restart do to a character model?
primary: validation loss after the last slice
reference: base
gate: [base, exact]
trainer:
  command: ["{python}", CHAR.py, "--out_dir={checkpoints}", "--seed={seed}", "--max_iters={last}", "--lr_iters={total}",
            "--save_interval={last}", "--batch_size={batch}", "--warm_again={warm}", "--positions={data}",
            "--fresh_moments={fresh}"]
  resume: ["--init_from={resume}"]
  checkpoint: iter-{step}
  settings: {batch: 8, warm: 0, fresh: 0}
  metrics: output
  lines: {val_loss: 'step (\\d+): val loss (\\S+)'}
  outcome: val_loss
arms:
  base:    {slices: [1, 2]}
  exact:   {slices: [1, 2], restart: {}}
  moments: {slices: [1, 2], restart: {set: {fresh: 1}}}
  warmed:  {slices: [1, 2], restart: {set: {fresh: 1, warm: 10}}}
  at-once: {slices: [1, 2], restart: {at: [0], reshuffle: true, set: {batch: 6}}}
  small:   {slices: [1, 2], set: {batch: 4}}
  again:   {slices: [1, 1]}
  within:  {slices: [1, 2], restart: {at: [0.5, 1.5]}}
  other:   {slices: [1, 2], restart: {reshuffle: true}}
contrasts:
  lost-moments: {plus: moments, minus: base, family: main, question: "Do lost moments leave lasting harm?"}
  smaller-batch: {plus: small, minus: base, question: "And half the batch?"}
profiles:
  tiny: {start_updates: 20, slice_updates: 20, seeds: 1, arms: [base, moments, small, again, within], once: [exact]}
  many: {start_updates: 20, slice_updates: 20, seeds: 3, starts: 2, arms: [base, moments, warmed, other], once: [exact]}
""".replace("CHAR.py", str(STRANGERS / "char.py"))
HF = """
v: 1
name: clm
title: What does a restart do to an HF Trainer?
primary: eval_loss after the last slice
reference: base
gate: [base, exact]
trainer:
  command: ["{python}", RUN_CLM.py, --output_dir, "{checkpoints}", --seed, "{seed}", --max_steps, "{total}",
            --save_steps, "{last}", --eval_strategy, steps, --eval_steps, "{last}", --logging_steps, "1",
            --report_to, none, --use_cpu, "True", --disable_tqdm, "True", --per_device_train_batch_size, "8",
            --learning_rate, "0.003", --max_grad_norm, "{norm}"]
  resume: [--resume_from_checkpoint, "{resume}"]
  checkpoint: checkpoint-{step}
  settings: {norm: 1.0}
  stop: checkpoint
  outcome: eval_loss
arms:
  base:    {slices: [1, 2]}
  exact:   {slices: [1, 2], restart: {}}
  clipped: {slices: [1, 2], restart: {set: {norm: 0.001}}}
contrasts:
  clipping: {plus: clipped, minus: base, family: main, question: "Does clipping after a restart leave lasting harm?"}
profiles:
  tiny: {start_updates: 10, slice_updates: 10, seeds: 1, arms: [base, clipped], once: [exact]}
""".replace("RUN_CLM.py", str(STRANGERS / "run_clm.py"))


@pytest.fixture
def plan() -> StudyPlan:
    return plan_study(parse_study(CHAR), "tiny")


@pytest.fixture
def many() -> StudyPlan:
    return plan_study(parse_study(CHAR), "many")


@pytest.fixture
def paths(tmp_path: Path) -> StudyPaths:
    return StudyPaths(tmp_path / "study")


def words(plan: StudyPlan, paths: StudyPaths, run: str, leg: int) -> list[str]:
    one = plan.run(run)
    return LegLaunch(plan, one, one.legs[leg - 1], paths).words("python")


# --- The definition


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("--seed={seed}", "--seed={sede}", "unknown placeholder `{sede}`"),
        ("--seed={seed}", "--seed={seed", "has a brace alone"),
        ("checkpoint: iter-{step}", "checkpoint: iter-{last}", "`{last}` in 'iter-{last}': expected one of step"),
        ("seeds: 1, arms", "seeds: 1, set: {bach: 4}, arms", "profile `tiny` sets `bach`: the trainer's settings are"),
        ("set: {batch: 4}", "set: {bach: 4}", "arm `small` sets `bach`: the trainer's settings are batch, warm, fresh"),
        ("settings: {batch: 8,", "settings: {seed: 8,", "setting `seed` of the trainer"),
        ("settings: {batch: 8,", "settings: {batch: [8],", "expected names, each with a word or"),
        ("(\\d+): val loss (\\S+)", "\\d+: val loss (\\S+)", "has 1 groups, expected step and value"),
        ("(\\d+): val loss (\\S+)", "(\\d+: val loss (\\S+)", "is no regular expression"),
        ("outcome: val_loss", "outcome: val_loss\n  stop: never", "stop is 'never', expected itself or checkpoint"),
        ("outcome: val_loss", "outcome: val_loss\n  comand: x", "unknown key `comand` in trainer"),
    ],
)
def test_a_trainer_that_cannot_be_launched_is_refused_with_the_key(old: str, new: str, said: str) -> None:
    assert old in CHAR
    with pytest.raises(BadStudy) as problem:
        parse_study(CHAR.replace(old, new), where="char.yaml")
    assert said in problem.value.message and "char.yaml" in problem.value.message


def test_settings_belong_to_a_trainer() -> None:
    text = Path("experiments/studies/restart-impact.yaml").read_text()
    with pytest.raises(BadStudy, match="arm `A` sets `x`: the trainer's settings are lost, width"):
        parse_study(text.replace('A:       {slices: [1, 2, 3, 4],', 'A:       {slices: [1, 2, 3, 4], set: {x: 1},'))


def test_a_registered_study_with_a_trainer_is_read_back_the_same(plan: StudyPlan) -> None:
    assert StudyPlan.from_json(json.loads(json.dumps(plan.to_json()))).plan_hash == plan.plan_hash
    assert plan.study.unit == "nats" and "trainer: {python}" in format_study_plan(plan).replace("'", "")


# --- What a launch is told


def test_a_launch_is_told_its_steps_its_data_and_its_checkpoint(plan: StudyPlan, paths: StudyPaths) -> None:
    told = dict(word.removeprefix("--").split("=", 1) for word in words(plan, paths, "base-s0", 1)[2:])
    assert (told["max_iters"], told["lr_iters"], told["save_interval"], told["positions"]) == ("60", "60", "60", "20:60")
    assert told["init_from"] == str(paths.checkpoints_dir(START) / "iter-20")
    start = dict(word.removeprefix("--").split("=", 1) for word in words(plan, paths, START, 1)[2:])
    assert (start["max_iters"], start["positions"], start.get("init_from")) == ("20", "0:20", None)


def test_repeated_and_cut_slices_are_positions(plan: StudyPlan, paths: StudyPaths) -> None:
    assert "--positions=20:40,20:40" in words(plan, paths, "again-s0", 1)
    assert "--positions=20:30" in words(plan, paths, "within-s0", 1)
    assert "--positions=30:50" in words(plan, paths, "within-s0", 2)  # to the middle of the second slice


def test_settings_are_the_arms_and_after_a_restart_its_own(many: StudyPlan, plan: StudyPlan, paths: StudyPaths) -> None:
    assert "--batch_size=4" in words(plan, paths, "small-s0", 1)
    assert "--warm_again=0" in words(many, paths, "warmed-s0", 1)
    assert "--warm_again=10" in words(many, paths, "warmed-s0", 2)
    for name, leg, treated in (("base", 1, False), ("moments", 1, False), ("moments", 2, True), ("warmed", 2, True),
                               ("other", 2, True), ("exact", 2, False)):  # fmt: skip
        run = many.run(f"{name}-s0")
        assert LegLaunch(many, run, run.legs[leg - 1], paths).is_treated is treated, name
    again = plan.run("again-s0")
    assert LegLaunch(plan, again, again.legs[0], paths).is_treated  # it reads other data than the checkpoint expects


def test_a_restart_at_0_treats_the_common_checkpoint_in_one_launch(many: StudyPlan, paths: StudyPaths) -> None:
    text = CHAR.replace("arms: [base, moments, warmed, other]", "set: {batch: 7}, arms: [base, at-once]")
    plan = plan_study(parse_study(text), "many")
    run = plan.run("at-once-s4")
    (leg,) = run.legs
    assert (leg.first, leg.last, LegLaunch(plan, run, leg, paths).is_treated) == (0, 40, True)
    told = words(plan, paths, "at-once-s4", 1)
    assert "--batch_size=6" in told and "--batch_size=7" in words(plan, paths, "base-s4", 1)
    assert f"--init_from={paths.checkpoints_dir('start2').resolve() / 'iter-20'}" in told
    base = plan.run("base-s4")
    assert not LegLaunch(plan, base, base.legs[0], paths).is_treated  # what a profile sets is no treatment
    found = LegLaunch(plan, run, leg, paths).placeholders("python")
    assert found["order"] == 1
    assert LegLaunch(plan, base, base.legs[0], paths).placeholders("python")["order"] == 0
    assert [name for name in (one.name for one in plan.runs) if name.startswith("exact")] == ["exact-s0", "exact-s3"]


def test_an_arm_is_treated_from_the_update_that_its_plan_says(plan: StudyPlan, many: StudyPlan) -> None:
    assert find_treatment(plan, plan.run("small-s0")) == (None, 0)
    assert find_treatment(plan, plan.run("moments-s0")) == (None, 20)
    assert find_treatment(plan, plan.run("again-s0")) == (20, None)
    assert find_treatment(many, many.run("other-s0")) == (20, None)
    assert find_treatment(plan, plan.run("within-s0")) == (None, None)


def test_seeds_are_crossed_with_common_checkpoints(many: StudyPlan, paths: StudyPaths) -> None:
    assert [run.name for run in many.runs if run.arm == START] == ["start", "start2"]
    assert len([run for run in many.runs if run.arm == "base"]) == 6
    last = many.run("base-s5")
    assert (many.start_of(last).name, many.order_seed(last)) == ("start2", 2)
    assert "--seed=2" in words(many, paths, "base-s5", 1) and "--seed=1" in words(many, paths, "start2", 1)
    assert LegLaunch(many, last, last.legs[0], paths).resume_path == paths.checkpoints_dir("start2") / "iter-20"


# --- State lost in a copy


def save_state(directory: Path) -> None:
    directory.mkdir(parents=True)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    state = {"optimizer": optimizer.state_dict(), "step": 1, "chronicle": {"v": 1}, "model": model.state_dict()}
    torch.save(state, directory / "state.pt")
    torch.save({"rng": torch.get_rng_state()}, directory / "rng.pt")


# --- What a launch left


def leave(plan: StudyPlan, paths: StudyPaths, lines: list[str], step: int = 60) -> None:
    log = paths.run("base-s0").supervisor_log(1)
    log.parent.mkdir(parents=True)
    log.write_text("\n".join(lines) + "\n")
    save_state(paths.checkpoints_dir("base-s0") / f"iter-{step}")


def test_curves_and_outcome_are_read_from_printed_lines(plan: StudyPlan, paths: StudyPaths) -> None:
    leave(plan, paths, [f"iter {i}: loss {3 - i / 100:.4f}, lr 0.01" for i in range(15, 63)] + ["step 60: val loss 2.25"])
    run = plan.run("base-s0")
    result = LegLaunch(plan, run, run.legs[0], paths).read(1, None)
    assert dict(result.final) == {"val_loss": 2.25}
    points = list(read_metrics(paths.curves_path("base-s0", 1)))
    assert [point.step for point in points] == list(range(21, 61))  # neither what came before nor what came after the leg
    assert points[-1].values == {"val_loss": 2.25, "loss": 2.4, "lr": 0.01}


@pytest.mark.parametrize(
    ("lines", "step", "said"),
    [
        (["iter 21: loss 2.5"], 60, "has no `val_loss` in steps 21 to 60; there is `loss`"),
        (["step 60: val loss 2.25"], 60, "has no `loss` in steps 21 to 60"),
        (["hello"], 60, "left no metrics that can be read"),
        (["iter 21: loss 2.5", "step 60: val loss 2.25"], 50, "left no checkpoint `iter-60` after step 60"),
    ],
)
def test_what_a_launch_did_not_leave_is_said(
    plan: StudyPlan, paths: StudyPaths, lines: list[str], step: int, said: str
) -> None:
    leave(plan, paths, lines, step)
    run = plan.run("base-s0")
    with pytest.raises(StudyError) as problem:
        LegLaunch(plan, run, run.legs[0], paths).read(1, None)
    assert said in problem.value.message


def test_equal_tensors_are_equal_whatever_else_a_checkpoint_says(plan: StudyPlan, paths: StudyPaths) -> None:
    state = {"model": {"w": torch.ones(3)}, "saved_at": 1.0}
    found = []
    for number, changed in enumerate(({}, {"saved_at": 2.0}, {"model": {"w": torch.zeros(3)}})):
        torch.save(state | changed, paths.study_dir.parent / f"{number}.pt")
        found.append(digest_checkpoint(paths.study_dir.parent / f"{number}.pt", 1)[0])
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("unchanged", ["", "small", "again"])
def test_data_that_nobody_logged_are_not_called_equal(plan: StudyPlan, paths: StudyPaths, unchanged: str) -> None:
    """Arms of a trainer that logs no digest: the loss is compared, and of the data it is said that they were not.

    A setting may change no loss (an interval of checkpoints), and that is said; other data that change none were not read.
    """
    from tests.experiments.fakes import FakeLauncher

    class Printed(FakeLauncher):
        def start(self, launch):  # type: ignore[no-untyped-def]
            running, run, leg = super().start(launch), launch.run, launch.leg
            finish = running.finish

            def written():  # type: ignore[no-untyped-def]
                done = finish()
                with MetricsWriter(self.paths.curves_path(run.name, done.launch)) as metrics:
                    for update in range(leg.first + 1, leg.last + 1):
                        treated = {"moments", "small", "again"} - {unchanged}
                        off = 0.5 if run.arm in treated and update > (20 if run.arm != "small" else 0) else 0.0
                        metrics.write(20 + update, {"loss": 5.0 - update / 100 + off})
                return done

            running.finish = written
            return running

    from experiments.runner import run_study

    run_study(plan, paths, Printed(paths, final=lambda run: {"val_loss": 1.0}), sleep=lambda seconds: None)
    data = read_study(*read_registered(paths), paths)
    checks = {check.name: check for check in check_gates(data)}
    failed = [check.name for check in checks.values() if not check.ok]
    assert failed == (["A/A again-s0"] if unchanged == "again" else [])
    assert ("what was set changed no loss" in checks["A/A small-s0"].found) == (unchanged == "small")
    if unchanged == "again":
        assert checks["A/A again-s0"].found == "data never differ: the treatment did not take place"
        return
    for channel in ("data_digest", "lr"):
        assert f"not compared: no `{channel}` was logged" in checks["A/A moments-s0"].found
    assert data.runs["base", 0].outcome("val_loss") == 1.0


# --- For real


def run_killed_and_again(study: Path, logs: Path, launches: int) -> str:
    """Run a study, KILL its runner after some launches, go on; return what the second one said."""
    command = [sys.executable, "-m", "chronicle_ml", "experiment", "run", str(study), "--profile", "tiny", "--logs", str(logs)]
    first = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert first.stderr is not None
    for _ in range(launches):
        assert "done" in first.stderr.readline()
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    again = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    assert again.returncode == 0, again.stdout + again.stderr
    return again.stdout


def legs_done(paths: StudyPaths) -> list[tuple[str, int]]:
    return [(entry.data["run"], entry.data["leg"]) for entry in read_journal(paths.journal).of_kind(EntryKind.EXPERIMENT_LEG)]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_plain_script_is_studied_through_a_kill_of_the_study(tmp_path: Path) -> None:
    study = tmp_path / "char.yaml"
    study.write_text(CHAR)
    assert "7 of 7 runs complete" in run_killed_and_again(study, tmp_path / "logs", 3)
    paths = StudyPaths(tmp_path / "logs" / "char-tiny")
    plan, history = read_registered(paths)
    done = legs_done(paths)
    assert len(done) == len(set(done)) == plan.num_launches
    build_report(paths, tmp_path / "report")  # refused where exact restarts differ or arms part before their treatment
    text = (tmp_path / "report" / "report.md").read_text()
    assert "| exact restart, seed 0 |" in text and "bits per byte" not in text
    data = read_study(plan, history, paths)
    ends = {arm: data.runs[arm, 0].outcome(plan.study.trainer.outcome) for arm in data.arms}
    assert ends["exact"] == ends["base"] == ends["within"] and len(set(ends.values())) == len(ends) - 2
    assert all(entries.of_kind(EntryKind.LAUNCH_START) for entries in (read_journal(paths.run(r.name)) for r in plan.runs))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_unedited_trainer_script_is_studied_and_its_restarts_are_exact(tmp_path: Path) -> None:
    """HF's Trainer with its own options: each launch is ended at its checkpoint, as a preemption would; the guard is on."""
    study = tmp_path / "clm.yaml"
    study.write_text(HF)
    assert "4 of 4 runs complete" in run_killed_and_again(study, tmp_path / "logs", 1)
    paths = StudyPaths(tmp_path / "logs" / "clm-tiny")
    plan, history = read_registered(paths)
    build_report(paths, tmp_path / "report")
    data = read_study(plan, history, paths)
    ends = {arm: data.runs[arm, 0].outcome(plan.study.trainer.outcome) for arm in data.arms}
    assert ends["exact"] == ends["base"] != ends["clipped"]
    # Nothing differs. The next batch is not compared in a first launch (the common start's batches are another run's), nor
    # where TERM came right at the save, before a next batch was read: the guard calls both unverified, and says why.
    assert history.done["exact-s0"][0].guard == "unverified"
    for _, said in events_of(read_journal(paths.run("exact-s0")).entries, GuardVerdict):
        left = {check["name"] for check in said.checks if check["outcome"] == "not compared"}
        assert (said.verdict, left) in (("passed", set()), ("unverified", {"next batch"}))

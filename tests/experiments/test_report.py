"""The report on planted results: verdicts find them, broken controls refuse it, the same data give the same bytes."""

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chronicle.journal import read_journal
from chronicle.journal.events import EntryKind
from experiments.definition import find_study
from experiments.design import START, Leg, StudyPlan, StudyRun, plan_study
from experiments.errors import GateFailed, NotRegistered, StudyError
from experiments.files import StudyPaths
from experiments.gates import check_gates, find_treatment
from experiments.outcomes import bounce, find_transients, read_study
from experiments.report import build_report, judge_folder
from experiments.runner import read_registered, run_study
from experiments.tables import column, parse_csv
from experiments.verdicts import (
    EffectVerdict,
    Question,
    answer_questions,
    judge,
    judge_bounce,
    judge_study,
    what_would_settle,
)
from tests.experiments.fakes import FakeLauncher

SEEDS = 8
PLANTED = {"A": 0.0, "A-prime": 0.0, "B": 0.001, "C": 0.101, "C0": 0.1}  # bits per byte at the end
Spoiled = tuple[StudyPaths, FakeLauncher]
ABLATED = ("B-opt", "B-lr")


def small_plan(seeds: int = SEEDS, arms: tuple[str, ...] = ("A", "B", "C0", "C", *ABLATED), **changes: Any) -> StudyPlan:
    study = find_study("restart-impact")
    sizes = replace(study.profile("ci"), seeds=seeds, slice_updates=15, arms=arms, once=())
    return plan_study(replace(study, profiles=(sizes,), **changes), "ci")


@dataclass
class Planted:
    """Values of a run: a falling loss with the seed's noise, the planted end, and a jump where moments are lost."""

    plan: StudyPlan

    def noise(self, run: StudyRun, update: int) -> float:
        return float(np.random.default_rng([run.seed, update + 1000]).normal(0, 0.01))

    def values(self, run: StudyRun, leg: Leg, update: int) -> dict[str, float]:
        known = () if run.arm == START else find_treatment(self.plan, run)
        treated = any(after is not None and update > after for after in known)
        own = PLANTED.get(run.arm, 0.0) * update / 60 if treated else 0.0
        jump = 0.5 * 0.8 ** (update - leg.first) if run.arm == "B-opt" and leg.number > 1 else 0.0
        loss = 1.0 - update / 200 + self.noise(run, update) + own + jump
        values = {"loss": loss + (1e-6 if treated else 0.0), "bpb/code": 6 * loss, "ratio/code": 0.7}
        if run.arm == "B-lr" and treated:
            values["lr"] = 0.2
        if update % 15 == 0:
            values["eval/mixture"] = 6 * loss
        return values

    def final(self, run: StudyRun) -> dict[str, float]:
        if run.arm == START:
            return {"eval_bpb": 4.0}
        spread = 0.05 if run.arm == "B-opt" else 0.004
        own = np.random.default_rng([run.seed, len(run.arm), ord(run.arm[0])]).normal(0, spread)
        noise = 0.0 if run.arm in ("A", "A-prime") else float(own)
        return {"eval_bpb": 4.0 + 0.1 * run.seed + PLANTED.get(run.arm, 0.0) + noise}


@pytest.fixture(scope="module")
def plan() -> StudyPlan:
    return small_plan()


@pytest.fixture(scope="module")
def finished(plan: StudyPlan, tmp_path_factory: pytest.TempPathFactory) -> StudyPaths:
    paths = StudyPaths(tmp_path_factory.mktemp("study") / "planted")
    run_study(plan, paths, launcher_for(plan, paths))
    return paths


@pytest.fixture(scope="module")
def built(finished: StudyPaths, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("report")
    build_report(finished, directory)
    return directory


def launcher_for(plan: StudyPlan, paths: StudyPaths) -> FakeLauncher:
    planted = Planted(plan)
    return FakeLauncher(paths, values=planted.values, final=planted.final)


@pytest.fixture
def spoiled(plan: StudyPlan, tmp_path: Path) -> Iterator[Spoiled]:
    paths = StudyPaths(tmp_path / "spoiled")
    yield paths, launcher_for(small_plan(1, ("A", "B")), paths)


def run_small(spoiled: Spoiled) -> StudyPaths:
    paths, launcher = spoiled
    run_study(small_plan(1, ("A", "B")), paths, launcher)
    return paths


def test_verdicts_find_what_was_planted(built: Path, plan: StudyPlan) -> None:
    """+0.1 by repetition is seen, +0.001 by restarts is equivalent, noise of 0.05 settles nothing."""
    outcomes = column(parse_csv("outcomes", (built / "outcomes.csv").read_text()), "eval_bpb")
    verdicts = {one.name: one for one in judge_study(plan, outcomes)}
    expected = {"repetition": "difference", "restart": "equivalent", "lost-moments": "inconclusive", "b-vs-c": "difference",
                "restart-on-repeated": "equivalent", "restart, main effect": "equivalent", "interaction": "equivalent"}
    assert {name: verdicts[name].verdict for name in expected} == expected
    found = verdicts["repetition"].result
    assert found is not None and (found.num_pairs, found.num_units) == (8, 8)
    assert found.mean == pytest.approx(0.1, abs=0.01) and found.low > 0
    restart = verdicts["restart"]
    (alone,) = judge([(restart.asked._replace(family="other"), restart.differences)], margin=0.02)
    assert restart.result is not None and alone.result is not None and restart.result.t_p >= alone.result.t_p  # Holm


def test_seeds_that_share_their_slice_are_one_observation(built: Path) -> None:
    """A planted design with pseudo-replication, analysed by its units: eight seeds over four slices are four."""
    outcomes = column(parse_csv("outcomes", (built / "outcomes.csv").read_text()), "eval_bpb")
    verdicts = {one.name: one for one in judge_study(small_plan(units=("slice",)), outcomes)}
    found = verdicts["repetition"].result
    assert found is not None and (found.num_pairs, found.num_units) == (8, 4)
    assert verdicts["repetition"].verdict is EffectVerdict.INCONCLUSIVE  # four units: the exact test cannot agree
    assert "below 6 units the sign-flip test cannot agree" in what_would_settle(verdicts["repetition"])


def test_a_folder_is_judged_again_from_its_raw_files_alone(built: Path, tmp_path: Path) -> None:
    """No journal, no run: the same bytes from the same files, and another margin says another thing everywhere."""
    again = tmp_path / "again"
    shutil.copytree(built, again)
    for name in ("report.md", "summary.json", "contrast-table.csv", "contrasts.png"):
        (again / name).unlink()
    judge_folder(again)
    assert {p.name: p.read_bytes() for p in again.iterdir()} == {p.name: p.read_bytes() for p in built.iterdir()}
    registered = json.loads((again / "plan.json").read_text())
    registered["study"]["margin_bpb"] = 1e-9
    (again / "plan.json").write_text(json.dumps(registered))
    judge_folder(again)
    assert json.loads((again / "summary.json").read_text())["contrasts"]["restart"]["verdict"] == "inconclusive"
    for value in json.loads((again / "summary.json").read_text())["contrasts"]["restart"].values():
        assert not isinstance(value, float) or value == float(f"{value:.10g}")  # the same on another type of CPU
    assert "Not settled: B − A" in (again / "report.md").read_text()
    with pytest.raises(StudyError, match="does not hold the raw files"):
        judge_folder(tmp_path)


def test_every_question_is_answered_in_words_with_what_would_settle_it(built: Path) -> None:
    text = (built / "report.md").read_text()
    for question in ("A vs B: is it the simple fact of restarting?", "B vs C: is it the repetition of data?", "Or neither"):
        assert question in text
    repeated = next(line for line in text.splitlines() if line.startswith("**B vs C"))
    assert "** An effect: C0 ends 0." in repeated and "What this cannot say: A slice is read four times" in repeated
    assert "95 % interval" in repeated and "90 % interval" in repeated and "n = 8 seeds" in repeated
    assert "with one seed allows no inference" in text


def test_two_plots_are_written_beside_their_numbers(built: Path) -> None:
    plots = {path.stem for path in built.glob("*.png")}
    assert plots == {"transients", "contrasts"}
    for name in plots:
        assert (built / f"{name}.png").stat().st_size > 2000
    for name in ("transients", "contrast-table", "outcomes", "controls"):
        assert len((built / f"{name}.csv").read_text().splitlines()) > 2


def test_the_same_data_give_the_same_bytes_and_one_entry(finished: StudyPaths, built: Path, tmp_path: Path) -> None:
    build_report(finished, tmp_path)
    one, two = ({p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in d.iterdir()} for d in (built, tmp_path))
    assert one == two
    entries = list(read_journal(finished.journal).of_kind(EntryKind.EXPERIMENT_REPORT))
    assert [dict(entry.data["files"]) for entry in entries] == [one]
    assert entries[0].data["verdicts"]["restart"] == "equivalent"


def test_other_pages_can_draw_the_study_from_its_entry_alone(finished: StudyPaths, built: Path) -> None:
    """docs/studies.md: words in the entry, curves in one JSON object, plots as objects; nothing of `experiments` needed."""
    entry = next(read_journal(finished.journal).of_kind(EntryKind.EXPERIMENT_REPORT))
    arms = {row["id"]: row for row in entry.data["arms"]}
    assert (arms["B"]["restarts"], arms["B"]["data"], arms["C0"]["data"]) == (3, "1 2 3 4", "1 1 1 1")
    assert {row["q"] for row in entry.data["questions"]} >= {"B vs C: is it the repetition of data?"}
    assert all(row["answer"] for row in entry.data["questions"])
    stored = {row["path"]: finished.journal.object_path(row["sha256"]) for row in entry.data["evidence"]}
    assert len([row for row in entry.data["evidence"] if row["kind"] == "plot"]) == 2
    assert all(path.is_file() for path in stored.values())


def test_a_file_that_lies_in_the_folder_already_is_no_part_of_the_report(finished: StudyPaths, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    build_report(finished, tmp_path)
    assert len(list(read_journal(finished.journal).of_kind(EntryKind.EXPERIMENT_REPORT))) == 1


def test_all_controls_hold_on_the_planted_study(plan: StudyPlan, finished: StudyPaths) -> None:
    data = read_study(*read_registered(finished), finished)
    checks = check_gates(data)
    assert [check.name for check in checks if not check.ok] == []
    assert sum(check.name.startswith("A/A") for check in checks) == len(data.runs) - SEEDS


def test_an_exact_restart_that_is_not_exact_refuses_the_report(spoiled: Spoiled, tmp_path: Path) -> None:
    _, launcher = spoiled
    original = launcher.values
    one_bit = 2**-50

    def values(run: StudyRun, leg: Leg, update: int) -> dict[str, float]:
        honest = dict(original(run, leg, update))
        return {**honest, "loss": honest["loss"] + one_bit * (run.arm == "A-prime" and update == 41)}

    launcher.values = values
    with pytest.raises(GateFailed, match=r"A/A A-prime-s0: loss differs from update 41 on"):
        build_report(run_small(spoiled), tmp_path)
    assert not (tmp_path / "report.md").exists()


def test_other_weights_after_an_exact_restart_refuse_the_report(spoiled: Spoiled, tmp_path: Path) -> None:
    spoiled[1].weights = lambda run: run.arm
    with pytest.raises(GateFailed, match="weights at the end differ"):
        build_report(run_small(spoiled), tmp_path)


def test_data_that_differ_before_the_treatment_refuse_the_report(spoiled: Spoiled, tmp_path: Path) -> None:
    """The seed's accidental A/A test, which failed unseen: B and C differed before their first restart."""
    _, launcher = spoiled
    original = launcher.digests
    launcher.digests = lambda launch: [  # type: ignore[method-assign]
        digest + (launch.run.arm == "B" and position == 3) for position, digest in enumerate(original(launch))]
    with pytest.raises(GateFailed, match="A/A B-s0: data differ from update 4 on"):
        build_report(run_small(spoiled), tmp_path)


def test_a_treatment_that_did_not_take_place_refuses_the_report(spoiled: Spoiled, tmp_path: Path) -> None:
    _, launcher = spoiled
    original = launcher.digests
    exact = small_plan(1, ("A", "B")).run("A-prime-s0").legs
    launcher.digests = lambda launch: original(  # type: ignore[method-assign]
        replace(launch, run=replace(launch.run, arm="A-prime", legs=exact)) if launch.run.arm == "B" else launch)
    with pytest.raises(GateFailed, match="the treatment did not take place"):
        build_report(run_small(spoiled), tmp_path)


def test_an_unequal_learning_rate_refuses_the_report(spoiled: Spoiled, tmp_path: Path) -> None:
    _, launcher = spoiled
    original = launcher.values
    launcher.values = lambda run, leg, update: {
        **original(run, leg, update), "lr": 0.1 + 1e-12 * (run.arm == "B" and update > 50)}
    with pytest.raises(GateFailed, match="A/A B-s0: LR differs from update 51 on"):
        build_report(run_small(spoiled), tmp_path)


def test_a_gate_that_was_not_run_refuses_the_report(spoiled: Spoiled, tmp_path: Path) -> None:
    spoiled[1].fate = lambda run, leg: 1 if run.arm == "A-prime" else 0
    with pytest.raises(GateFailed, match="no seed at which both"):
        build_report(run_small(spoiled), tmp_path)


def test_a_study_without_results_is_no_report(spoiled: Spoiled, tmp_path: Path) -> None:
    paths, launcher = spoiled
    with pytest.raises(NotRegistered):
        build_report(paths, tmp_path)
    launcher.fate = lambda run, leg: 1
    with pytest.raises(StudyError, match="no complete run"):
        build_report(run_small(spoiled), tmp_path)


def test_a_stopped_run_is_named_and_not_in_the_numbers(spoiled: Spoiled, tmp_path: Path) -> None:
    spoiled[1].fate = lambda run, leg: 137 if (run.arm, leg.number) == ("B", 3) else 0
    build_report(run_small(spoiled), tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "Stopped, not in the numbers: B-s0: ended with code 137" in text
    assert "**B**" not in text


def test_lost_moments_leave_a_transient_of_the_planted_size(finished: StudyPaths) -> None:
    """0.5 bits per byte, falling by a fifth each update: area 0.5·Σ0.8^k."""
    data = read_study(*read_registered(finished), finished)
    found = find_transients(data.runs["B-opt", 0], data.runs["A", 0])
    assert [(one.after, one.num_updates) for one in found] == [(30, 20), (30, 30)]
    for one in found:
        assert one.identical_batches
        assert one.area == pytest.approx(0.5 * sum(0.8**k for k in range(1, one.num_updates + 1)), rel=1e-3)


def test_curves_that_are_gone_are_no_empty_curves(tmp_path: Path) -> None:
    """An earlier version kept them in another file, under other names: nothing is compared with what is not there."""
    paths = StudyPaths(tmp_path / "study")
    small = small_plan(1, ("A", "B"))
    run_study(small, paths, launcher_for(small, paths))
    history = read_registered(paths)[1]
    paths.curves_path("B-s0", history.done["B-s0"][0].launch).rename(tmp_path / "study-curves.jsonl")
    with pytest.raises(StudyError, match=r"of `B-s0` left no `curves\.jsonl`"):
        build_report(paths, tmp_path / "report")


def test_a_bounce_is_judged_by_its_registered_margin_and_never_without_one(built: Path, plan: StudyPlan) -> None:
    """Mean excess after a restart by arm and horizon, over the units; the report answers the seed's question."""
    seeds = range(8)
    excess = {("B", 20): {seed: 0.01 * (seed % 4) for seed in seeds}, ("C", 20): {seed: 0.5 + 0.001 * seed for seed in seeds}}
    scatter = {"A": dict.fromkeys(seeds, 0.1), "B": {seed: 0.1 + 0.001 * seed for seed in seeds}}
    quiet, loud, scattered, none = judge_bounce(plan, excess, scatter)
    assert (quiet.verdict, loud.verdict, scattered.verdict) == ("equivalent", "difference", "equivalent")
    assert (scattered.name, none.verdict) == ("scatter of B", "not tested")
    assert loud.result is not None and loud.result.low > plan.study.bounce_margin and loud.result.num_units == 8
    assert judge_bounce(replace(plan, study=replace(plan.study, bounce_margin=0.0)), excess, scatter) == ()
    text = (built / "report.md").read_text()
    assert "**Does the curve bounce after a restart?** Mean excess of the training loss" in text
    assert "bounce of B, 15 (B over A after a restart)" in text


def test_an_exact_restart_has_no_transient(finished: StudyPaths) -> None:
    data = read_study(*read_registered(finished), finished)
    for one in find_transients(data.runs["A-prime", 0], data.runs["A", 0]):
        assert (one.area, one.peak, one.recovered_after) == (0.0, 0.0, 0)


def test_bounce_is_the_scatter_around_the_trend_only() -> None:
    curve = np.full(100, np.nan)
    curve[9::10] = 5.0 - 0.1 * np.arange(10)
    assert bounce(curve) == pytest.approx(0.0, abs=1e-12)
    curve[9::20] += 0.2
    assert bounce(curve) == pytest.approx(np.sqrt(10 * 0.1**2 / 8), rel=0.05)
    assert np.isnan(bounce(np.full(10, np.nan)))


def test_a_control_that_is_small_but_real_was_seen() -> None:
    study = find_study("restart-impact")
    contrast = next(one for one in study.contrasts if one.family == "control")
    asked = Question(contrast.name, "B-lr − A", "control")

    def answer(differences: tuple[float, ...]) -> str:
        judged = judge([(asked, dict(enumerate(differences)))], margin=study.margin_bpb)
        return " ".join(text for _, text in answer_questions(study, judged))

    shifts = (-3e-3, 3e-3, -2e-3, 2e-3, -1e-3, 1e-3, -5e-4, 5e-4)
    assert "It was seen, but it is small" in answer(tuple(0.0093 + shift for shift in shifts))
    assert "must be there was not seen" in answer(shifts)


def test_two_arms_that_are_equal_to_the_last_digit_are_said_to_be() -> None:
    (one,) = judge([(Question("interval", "dense − base", "main"), {0: 0.0, 1: 0.0})], margin=0.02)
    assert one.verdict is EffectVerdict.INCONCLUSIVE
    assert "equal to the last digit in every pair" in what_would_settle(one)


def test_a_script_of_nobodys_works_out_the_committed_numbers_and_finds_a_changed_one(tmp_path: Path) -> None:
    script, committed = Path("docs/results/recompute.py").resolve(), Path("docs/results/restart-impact-cpu")
    for changed, code, said in (("", 0, "all cells agree"), ("+0.0028", 1, "restart-impact-cpu: restart, mean: 0.0079 there")):
        folder = tmp_path / str(code) / committed.name
        shutil.copytree(committed, folder)
        table = folder / "contrast-table.csv"
        text = table.read_text()
        table.write_text(text.replace(f",{changed},", ",+0.0079,", 1) if changed else text)
        done = subprocess.run([sys.executable, "-I", script, folder], capture_output=True, text=True)
        assert (done.returncode, said in done.stdout) == (code, True), done.stdout + done.stderr

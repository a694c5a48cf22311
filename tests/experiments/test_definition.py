"""Studies are data: what is registered, what is refused, and what a file of one's own needs."""

import itertools
import json
import textwrap
from pathlib import Path

import pytest

from experiments.definition import Study, build, find_study, list_studies, parse_study
from experiments.design import START, StudyPlan, legs_of, plan_study
from experiments.errors import BadStudy

OWN = """
v: 1
name: mine
title: mine
trainer: {command: [train, "{data}"]}
reference: X
arms:
  X: {slices: [1, 2]}
  Y: {slices: [1, 2], restart: {reshuffle: true}}
contrasts:
  harm: {plus: Y, minus: X, family: main, question: "does it hurt?"}
profiles:
  tiny: {start_updates: 2, slice_updates: 4, seeds: 2, arms: [X, Y]}
"""


def test_the_seeds_arms_and_all_ablations_are_in_the_study() -> None:
    study = find_study("restart-impact")
    assert {arm.name for arm in study.arms} == {"A", "A-prime", "B", "C", "C0", "B-opt", "B-lr"}
    assert {profile.name for profile in study.profiles} == {"ci", "cpu", "cpu-long", "gpu"}
    assert [c.name for c in study.contrasts if c.family == "main"] == ["restart", "repetition"]


@pytest.mark.parametrize("profile", ["ci", "cpu", "cpu-long", "gpu"])
def test_every_arm_makes_the_same_number_of_updates(profile: str) -> None:
    study = find_study("restart-impact")
    sizes = study.profile(profile)
    for arm in study.arms:
        legs = legs_of(arm, sizes)
        assert (legs[0].first, legs[-1].last) == (0, 4 * sizes.slice_updates)
        for before, after in itertools.pairwise(legs):
            assert after.first == before.last


def test_a_study_of_ones_own_works_like_ours() -> None:
    plan = plan_study(parse_study(OWN), "tiny")
    assert [run.name for run in plan.runs] == [START, "X-s0", "Y-s0", "X-s1", "Y-s1"]
    assert [leg.last for leg in plan.run("Y-s1").legs] == [4, 8]


def test_a_study_file_is_found_by_its_path(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "mine.yaml"
    path.write_text(OWN)
    assert find_study(str(path)) == parse_study(OWN)
    assert list_studies() == ("restart-impact",)


@pytest.mark.parametrize("folder", ["modern-restarts-cpu", "modern-restarts-pilot", "restart-impact-cpu", "restart-impact-ci",
                                    "restart-impact-bounce", "restart-impact-long"])
def test_registered_plans_of_committed_studies_are_read_with_their_hash(folder: str) -> None:
    """A field that came later changes no hash, and a study whose trainer is gone can be judged."""
    place = Path(__file__).parents[2] / "docs" / "results" / folder
    plan = StudyPlan.from_json(json.loads((place / "plan.json").read_text()))
    assert plan.plan_hash in (place / "report.md").read_text()


def test_orders_crossed_with_checkpoints_are_the_units_of_a_study_with_several_starts() -> None:
    place = Path(__file__).parents[2] / "docs" / "results" / "modern-restarts-cpu"
    plan = StudyPlan.from_json(json.loads((place / "plan.json").read_text()))
    assert plan.unit_kinds == ("checkpoint", "order")
    assert [plan.unit_of(seed) for seed in (0, 12, 38)] == [(0, 0), (0, 12), (2, 12)]
    place = Path(__file__).parents[2] / "docs" / "results" / "restart-impact-cpu"
    ours = StudyPlan.from_json(json.loads((place / "plan.json").read_text()))
    assert ours.unit_kinds == ("slice",) and [ours.unit_of(seed) for seed in (0, 3, 4)] == [(0,), (3,), (0,)]


def test_seeds_that_share_what_was_drawn_once_are_refused_as_units() -> None:
    """Pseudo-replication that is declared is no design: four seeds over two starts. Undeclared, they are crossed."""
    text = OWN.replace("seeds: 2", "seeds: 2, starts: 2")
    with pytest.raises(BadStudy, match="seeds share what was drawn once"):
        plan_study(parse_study(text.replace("reference: X", "reference: X\nunits: [seed]")), "tiny")
    assert plan_study(parse_study(text), "tiny").unit_kinds == ("checkpoint", "order")
    assert plan_study(parse_study(OWN.replace("reference: X", "reference: X\nunits: [seed]")), "tiny").unit_kinds == ("seed",)


def test_a_plan_survives_its_json_form_with_the_same_hash() -> None:
    study = find_study("restart-impact")
    assert build(Study, json.loads(json.dumps(study.to_json())), registered=True) == study
    plan = plan_study(study, "ci")
    again = StudyPlan.from_json(json.loads(json.dumps(plan.to_json())))
    assert (again, again.plan_hash) == (plan, plan.plan_hash)


def test_a_registered_plan_keeps_its_hash_and_what_another_version_wrote() -> None:
    """Its record is what was registered: a key that is not known here decides nothing, and stays in the hash."""
    record = json.loads(json.dumps(plan_study(find_study("restart-impact"), "ci").to_json()))
    record["study"]["of_another_version"] = 1
    plan = StudyPlan.from_json(record)
    assert plan == plan_study(find_study("restart-impact"), "ci") and plan.to_json() == record
    assert plan.plan_hash != plan_study(find_study("restart-impact"), "ci").plan_hash


def test_everything_that_decides_the_numbers_changes_the_plan_hash() -> None:
    study = find_study("restart-impact")
    hashes = {plan_study(study, "ci").plan_hash, plan_study(study, "cpu").plan_hash}
    for old, new in (("", ""), ("seeds: 2", "seeds: 3"), ("arms: [X, Y]", "arms: [X]"), ("family: main", "family: other")):
        hashes.add(plan_study(parse_study(OWN.replace(old, new)), "tiny").plan_hash)
    assert len(hashes) == 6


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("reshuffle: true", "reshufle: true", "unknown key `reshufle`"),
        ("reshuffle: true", "reshuffle: stock", "reshuffle is 'stock', expected true or false"),
        ("minus: X", "minus: Z", "unknown arm `Z`"),
        ("Y: {slices: [1, 2],", "Y: {slices: [1, 2, 1],", "same number of updates"),
        ("Y: {slices: [1, 2],", "Y: {slices: [0, 2],", "slices is (0, 2), expected a list of a whole number, 1 or more"),
        ("v: 1", "v: 2", "version 1"),
        ("title: mine", "title: [", "not YAML"),
        ("arms: [X, Y]", "arms: [X, Q]", "unknown arm `Q`"),
        ("reference: X", "reference: X\nmargin_bpb: 0", "margin_bpb"),
        ("title: mine\n", "", "key `title` is missing in study mine"),
        ("seeds: 2", "seeds: two", "profile tiny: seeds is 'two', expected a whole number, 1 or more"),
        ("seeds: 2", "seeds: true", "profile tiny: seeds is True, expected a whole number, 1 or more"),
        ("Y: {slices: [1, 2],", "Y: {slices: 2,", "arm Y: slices is 2, expected a list of a whole number, 1 or more"),
        ("Y: {slices: [1, 2],", "Y: {slices: [one],", "arm Y: slices is ('one',), expected a list of a whole number"),
        ("X: {slices: [1, 2]}", "X: 3", "key `arms` in study mine: the value of `X` is 3, expected a mapping"),
        ("restart: {reshuffle: true}", "restart: exact", "key `restart` in arm Y is 'exact'"),
        ("restart: {reshuffle: true}", "restart: {at: 0.5}", "restart: at is 0.5, expected a list of a number, 0 or more"),
        ('trainer: {command: [train, "{data}"]}', "sources: {code: 1}", "unknown key `sources`"),
        ('trainer: {command: [train, "{data}"]}\n', "", "key `trainer` is missing in study mine"),
        ("arms: [X, Y]", "arms: [Y]", "reference `X` is not among the arms of profile `tiny`"),
        ("slice_updates: 4", "slice_updates: 0", "slice_updates is 0"),
        ("start_updates: 2", "start_updates: -2", "start_updates is -2"),
        ("reference: X", "reference: X\nanswers: {why: [hram]}", "unknown contrast `hram` in answers"),
        ("reference: X", "reference: X\nunits: [sede]", "key `units` is ['sede'], expected one of ['seed']"),
    ],
)
def test_an_impossible_study_is_refused_with_the_key(old: str, new: str, said: str) -> None:
    """One sentence with file, key and what was expected; nothing is left for the launches to find."""
    assert old in OWN
    with pytest.raises(BadStudy) as problem:
        plan_study(parse_study(OWN.replace(old, new), where="mine.yaml"), "tiny")
    assert said in problem.value.message
    assert "\n" not in problem.value.message


def test_a_file_that_is_no_text_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadStudy, match=r"study file `.*mine.yaml` cannot be read"):
        find_study(str(path))


def test_an_unknown_profile_or_study_names_the_known_ones() -> None:
    with pytest.raises(BadStudy, match="tiny"):
        plan_study(parse_study(OWN), "huge")
    with pytest.raises(BadStudy, match="restart-impact"):
        find_study("restart-inpact")


def test_the_example_in_the_documentation_is_a_study() -> None:
    """The indented block of docs/studies.md that begins with `v: 1`."""
    text = (Path(__file__).parents[2] / "docs" / "studies.md").read_text(encoding="utf-8")
    lines = text[text.index("    v: 1") :].splitlines()
    block = list(itertools.takewhile(lambda line: line.startswith("    "), lines))
    plan = plan_study(parse_study(textwrap.dedent("\n".join(block))), "small")
    assert [leg.last for leg in plan.run("lost-s0").legs] == [50, 150, 600]
    assert len({plan.unit_of(run.seed) for run in plan.runs if run.arm == "lost"}) == 6

"""What a comparison of prints proves: each row of the table has its example, and each cause its name."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chronicle.journal import JournalWriter
from chronicle.journal.events import GuardVerdict, Replayed
from chronicle.paths import RunPaths
from chronicle.prints.compared import Comparison, RankCompared, Row, compare_prints
from chronicle.prints.ring import Print, SeenParts
from chronicle.replay.replay import Played, plays_agree
from chronicle.replay.verdict import (
    PLAYED_TWICE,
    ROWS,
    ReplayCase,
    ReplayVerdict,
    Ruling,
    StateLoaded,
    judge_replay,
    state_loaded,
)
from chronicle.report.markdown import render_markdown
from chronicle.story import read_story

ALL = SeenParts(0)
for each in SeenParts:
    ALL |= each if each not in (SeenParts.BEGINS,) else SeenParts(0)
START, UNTIL = 4, 10
Rows = dict[int, dict[int, Print]]


def prints(ranks: int = 1, seen: SeenParts = ALL) -> Rows:
    """Equal prints of steps 4 to 10 of some ranks."""
    steps = range(START, UNTIL + 1)
    return {
        rank: {
            step: Print(
                step=step, seen=seen, batches=2, batch=(100 * rank + step) << 32 | step, gradient=step, weights=step,
                torch=step, python=step, numpy=step,
                options=1, lr=0.1, loss=1.0 / step,
            )
            for step in steps
        }
        for rank in range(ranks)
    }  # fmt: skip


def compared(record: Rows, other: Rows, **more: Any) -> Comparison:
    begins = {rank: rows[START] for rank, rows in other.items()}
    return compare_prints(record, other, start=START, until=UNTIL, begins=begins, **more)


def judged(record: Rows, other: Rows, second: Rows | None = None, **more: Any) -> Ruling:
    """As a replay judges: a second one where that is asked for."""
    case = ReplayCase(ranks=compared(record, other).ranks, **more)
    first = judge_replay(case)
    if not first.again:
        return first
    one, two = played(other), played(other if second is None else second)
    return judge_replay(replace(case, plays_agree=plays_agree(case, one, two)))


def played(rows: Rows) -> Played:
    begins = {rank: steps[START] for rank, steps in rows.items()}
    return Played(prints=rows, begins=begins, start=START, facts=None, guard=())


def differing(field: str, step: int = 7, ranks: int = 1, rank: int = 0, until: int = UNTIL, seen: SeenParts = ALL) -> Rows:
    """Prints in which a field differs from a step on."""
    rows = prints(ranks, seen)
    for number in range(step, until + 1):
        rows[rank][number] = replace(rows[rank][number], **{field: 999})
    return rows


def test_equal_prints_are_reproduced() -> None:
    found = judged(prints(2), prints(2))
    assert found.verdict is ReplayVerdict.REPRODUCED
    assert "6 steps" in found.why and "weights" in found.why


@pytest.mark.parametrize(
    ("field", "verdict"),
    [
        ("options", ReplayVerdict.STATE),
        ("torch", ReplayVerdict.STATE),
        ("python", ReplayVerdict.STATE),
        ("numpy", ReplayVerdict.STATE),
        ("batch", ReplayVerdict.DATA),
        ("batches", ReplayVerdict.DATA),
        ("gradient", ReplayVerdict.UNEXPLAINED),
        ("loss", ReplayVerdict.UNEXPLAINED),
        ("weights", ReplayVerdict.UNEXPLAINED),
    ],
)
def test_the_first_part_that_differs_decides(field: str, verdict: ReplayVerdict) -> None:
    found = judged(differing(field), prints())
    assert found.verdict is verdict, found
    assert "step 7" in found.evidence[0]


def test_the_rank_that_differs_first_is_named() -> None:
    assert "rank 2" in judged(differing("weights", ranks=4, rank=2), prints(4)).why


def test_what_changed_comes_before_unexplained() -> None:
    for kind in ("code", "package", "environment", "arithmetic"):
        found = judged(differing("gradient"), prints(), changed=[(kind, "it has changed")])
        assert (found.verdict, found.why) == (ReplayVerdict.CODE, "it has changed")


def test_a_setting_that_changed_is_named_beside_other_data() -> None:
    """It may be no reason (a terminal), or the reason: a Trainer that smooths labels gives its model none."""
    for kind in ("environment", "file"):
        found = judged(differing("batch"), prints(), changed=[(kind, "`train.json` has changed")])
        assert found.verdict is ReplayVerdict.DATA and found.why.endswith("changed since: `train.json` has changed")


def test_two_replays_that_disagree_are_not_deterministic() -> None:
    assert judged(differing("gradient"), prints(), differing("gradient", 6)).verdict is ReplayVerdict.RANDOM


@pytest.mark.parametrize("field", ["batch", "torch"])
def test_what_enters_otherwise_in_two_replays_is_not_deterministic(field: str) -> None:
    found = judged(differing(field), prints(), differing(field, 6))
    assert found.verdict is ReplayVerdict.RANDOM and "what enters the step" in found.why


@pytest.mark.parametrize("missing", [SeenParts.BATCH, SeenParts.GENERATORS, SeenParts.OPTIONS])
def test_what_was_not_compared_is_named(missing: SeenParts) -> None:
    seen = ALL & ~missing
    found = judged(differing("gradient", seen=seen), prints(seen=seen))
    assert found.verdict is ReplayVerdict.UNEXPLAINED, found


def test_labels_that_were_not_compared_are_a_doubt() -> None:
    seen = ALL & ~SeenParts.TARGETS
    found = judged(differing("gradient", seen=seen), prints(seen=seen))
    assert found.verdict is ReplayVerdict.UNEXPLAINED and "labels" in found.why


def test_labels_that_one_side_alone_knows_were_not_compared() -> None:
    found = judged(differing("gradient"), prints(seen=ALL & ~SeenParts.TARGETS))
    assert found.verdict is ReplayVerdict.UNEXPLAINED and "labels, which do not enter the model, may be others" in found.why


def test_a_file_that_is_none_of_settings_is_data() -> None:
    """Labels and tables do not enter the model: only the result tells of them."""
    path = "/work/masks.npy"
    assert judged(differing("gradient"), prints(), changed=[("data", f"`{path}` has changed")]).verdict is ReplayVerdict.DATA
    changed = [("data", f"`{path}` has changed"), ("environment", "variable `T` has changed")]
    assert judged(differing("gradient"), prints(), changed=changed).verdict is ReplayVerdict.CODE


def test_a_settings_file_comes_before_the_options_that_it_holds() -> None:
    found = judged(differing("options"), prints(), changed=[("file", "`local.yaml` has changed")])
    assert found.verdict is ReplayVerdict.CODE and "local.yaml" in found.why and "options" in found.why


def test_numbers_that_no_launch_takes_are_no_steps() -> None:
    """Lightning counts the steps of all optimizers: there are prints of every second one."""

    def every_second(rows: Rows) -> Rows:
        return {rank: {step: one for step, one in steps.items() if step % 2 == 0} for rank, steps in rows.items()}

    record, clean = every_second(differing("gradient", step=8)), every_second(prints())
    assert judged(record, clean).verdict is ReplayVerdict.UNEXPLAINED
    del record[0][6]
    found = judged(record, clean)
    assert found.verdict is ReplayVerdict.UNEXPLAINED and "1 steps between have no print" in found.why


def test_what_entered_between_a_step_and_its_save_is_in_no_replay() -> None:
    """A critic that is called for its generator's loss after its own step."""
    record, first = prints(), START + 1
    record[0][first] = replace(record[0][first], batches=3, batch=5, torch=6)
    found = judged(record, prints())
    assert found.verdict is ReplayVerdict.REPRODUCED and "before and the save" in found.evidence[0]
    spoilt = {0: {**record[0], first: replace(record[0][first], gradient=99)}}
    assert judged(spoilt, prints()).verdict is ReplayVerdict.DATA  # as before
    fewer = prints()
    fewer[0][first] = replace(fewer[0][first], batches=1, batch=5)
    assert judged(fewer, prints()).verdict is ReplayVerdict.DATA
    later = prints()
    later[0][first + 1] = replace(later[0][first + 1], batches=3, batch=5)
    assert judged(later, prints()).verdict is ReplayVerdict.DATA


def test_missing_facts_and_steps_without_a_print_are_named() -> None:
    assert judged(differing("gradient"), prints(), facts_known=False).verdict is ReplayVerdict.UNEXPLAINED
    record = differing("gradient")
    del record[0][6]
    found = judged(record, prints())
    assert found.verdict is ReplayVerdict.UNEXPLAINED and "no print" in found.why


def test_a_checkpoint_with_other_weights_is_another_state() -> None:
    record = differing("gradient", 5)
    record[0][START] = replace(record[0][START], weights=1)
    assert judged(record, prints()).verdict is ReplayVerdict.STATE
    changed = [("code", "`dtypes.py` has changed")]  # weights are loaded otherwise
    assert judged(record, prints(), changed=changed).verdict is ReplayVerdict.CODE


def check(name: str, outcome: str, code: str = "M1", expected: str = "1", found: str = "2") -> dict[str, Any]:
    """A check of the guard as the journal keeps it."""
    return {"name": name, "code": code, "outcome": outcome, "expected": expected, "found": found}


def test_other_moments_in_the_checkpoint_are_another_state() -> None:
    checks = (check("optimizer moments", "different"), check("next batch", "different", "M4"))
    told = state_loaded([GuardVerdict(verdict="passed", checks=checks)])
    assert told.unlike == ("optimizer moments: 1 at the save, 2 after the load",) and told.compared
    found = judged(differing("weights", 5), prints(), load=told)
    assert found.verdict is ReplayVerdict.STATE and "optimizer moments" in found.why
    late = judged(differing("weights", 9), prints(), load=told)
    assert late.verdict is ReplayVerdict.UNEXPLAINED and "without effect in 4 steps" in late.why


def test_a_warning_names_what_differs_and_the_rest_was_compared() -> None:
    def warned(basis: str = "manifest", *names: str) -> GuardVerdict:
        different = check("gradient", "different", "M6")
        missing = tuple({"name": name, "why": "no record"} for name in names)
        return GuardVerdict(verdict="warned", basis=basis, checks=(different,), not_compared=missing)

    assert state_loaded([warned()]).compared
    assert not state_loaded([warned("manifest", "optimizer moments")]).compared
    assert not state_loaded([warned("none")]).compared


@pytest.mark.parametrize(
    ("checks", "compared_there", "verdict"),
    [
        ([], False, ReplayVerdict.UNEXPLAINED),
        ([check("optimizer moments", "equal")], True, ReplayVerdict.UNEXPLAINED),
        ([check("parameters with state", "equal", expected="0", found="0")], True, ReplayVerdict.UNEXPLAINED),
    ],
)
def test_moments_that_were_not_compared_are_named(
    checks: list[dict[str, Any]], compared_there: bool, verdict: ReplayVerdict
) -> None:
    told = state_loaded([GuardVerdict(verdict="passed", checks=tuple(checks))])
    assert told == StateLoaded(compared=compared_there)
    assert judged(differing("weights"), prints(), load=told).verdict is verdict


def test_an_unknown_beginning_is_named() -> None:
    record = differing("gradient")
    del record[0][START]
    assert judged(record, prints()).verdict is ReplayVerdict.UNEXPLAINED


def test_a_launch_that_began_without_a_checkpoint_made_its_weights_itself() -> None:
    """Their first effect is at its first step."""
    for step, verdict in ((7, ReplayVerdict.UNEXPLAINED), (START + 1, ReplayVerdict.UNEXPLAINED)):
        record = differing("gradient", step)
        del record[0][START]
        assert judged(record, prints(), has_checkpoint=False).verdict is verdict


def test_generators_that_nobody_restores_are_left_out_and_said() -> None:
    found = judged(differing("numpy", START), prints())
    assert found.verdict is ReplayVerdict.REPRODUCED
    assert "NumPy's generator: not as in the record" in found.evidence[0]
    assert "NumPy's" not in found.why and "Python's" in found.why
    record = differing("numpy", START)
    for step in range(7, UNTIL + 1):  # seeded anew: the one that is restored tells, though the other is not
        record[0][step] = replace(record[0][step], python=-1)
    found = judged(record, prints())
    assert found.verdict is ReplayVerdict.STATE and "Python's generator stands elsewhere from step 7 on" in found.why


def test_torchs_generator_that_nobody_restores_counts_only_where_no_result_came_out_equal() -> None:
    """A loader draws a seed in every epoch, and a trainer restores no generator: without dropout that has no effect."""
    found = judged(differing("torch", START), prints())
    assert found.verdict is ReplayVerdict.REPRODUCED and "torch's generators: not as in the record" in found.evidence[0]
    record = differing("torch", START)
    record[0][8] = replace(record[0][8], weights=-1)
    found = judged(record, prints())
    assert found.verdict is ReplayVerdict.UNEXPLAINED and found.why.startswith("everything compared is equal")
    assert "not ruled out: torch's generators stand elsewhere (without effect in 3 steps)" in found.why
    record[0][START + 1] = replace(record[0][START + 1], loss=9.0, gradient=9)
    found = judged(record, prints())
    assert found.verdict is ReplayVerdict.STATE and "torch's generators stand elsewhere from step 5 on" in found.why
    assert judged(differing("torch", 7), prints()).verdict is ReplayVerdict.STATE  # seeded anew in between


def test_nothing_compared_is_not_reproduced() -> None:
    assert judged(prints(), {0: {START: prints()[0][START]}}).verdict is ReplayVerdict.NOT_COMPARED
    weak = SeenParts.BATCH | SeenParts.OPTIONS
    assert judged(prints(seen=weak), prints(seen=weak)).verdict is ReplayVerdict.NOT_COMPARED
    short = prints()
    del short[0][UNTIL]
    assert judged(prints(), short).verdict is ReplayVerdict.NOT_COMPARED


def test_another_lr_is_named_with_both_values() -> None:
    record = prints()
    for step in range(7, UNTIL + 1):
        record[0][step] = replace(record[0][step], options=2, lr=0.2)
    found = judged(record, prints())
    assert found.verdict is ReplayVerdict.STATE and "0.2 in the record, 0.1 in the replay" in found.why


def test_random_numbers_that_were_drawn_within_a_step_are_another_state() -> None:
    record = differing("gradient", 7)
    for number in range(8, UNTIL + 1):
        record[0][number] = replace(record[0][number], torch=999)
    found = judged(record, prints())
    assert found.verdict is ReplayVerdict.STATE and "within step 7" in found.why


def test_a_large_file_that_was_written_anew_is_a_doubt_and_no_difference() -> None:
    changed = [("doubt", "`teacher.pt` was written anew")]
    assert judged(prints(), prints(), changed=changed).verdict is ReplayVerdict.REPRODUCED
    found = judged(differing("gradient"), prints(), changed=changed)
    assert found.verdict is ReplayVerdict.UNEXPLAINED and "teacher.pt" in found.why


# ---- the table: an example of each row ---------------------------------------------------------------------------------


def case_of(record: Rows, other: Rows | None = None, **more: Any) -> ReplayCase:
    return ReplayCase(ranks=compared(record, prints() if other is None else other).ranks, **more)


def put(case: ReplayCase, **changed: Any) -> ReplayCase:
    """The same case with its rank otherwise."""
    rank: RankCompared = case.ranks[0]
    return replace(case, ranks=[replace(rank, **changed)])


RESULT = case_of(differing("gradient"), plays_agree=True)
OTHER_WEIGHTS = put(RESULT, begins_equal=False)
FILE = [("file", "`base.yaml` has changed")]
EXAMPLES = {
    "no step compared": put(RESULT, steps=()),
    "no result in the prints": put(case_of(prints()), parts=frozenset({"batch"})),
    "a print is missing": put(case_of(prints()), missing=9),
    "equal": case_of(prints()),
    "code or packages": replace(RESULT, changed=[("package", "torch: 2.0 → 2.1")]),
    "what enters is not repeatable": case_of(differing("batch"), plays_agree=False),
    "other weights in the checkpoint": OTHER_WEIGHTS,
    "batch": case_of(differing("batch"), plays_agree=True, changed=FILE),
    "settings": case_of(differing("torch"), changed=FILE),
    "a file of data": replace(RESULT, changed=[("data", "`masks.npy` has changed")]),
    "begins with other weights": replace(OTHER_WEIGHTS, has_checkpoint=False),
    "set otherwise": case_of(differing("torch"), plays_agree=True),
    "state at the load": put(replace(RESULT, load=StateLoaded(unlike=("optimizer moments: 1 at the save, 2",))), steps=(7,)),
    "random numbers within the step": put(RESULT, drawn=True),
    "arithmetic is not repeatable": replace(RESULT, plays_agree=False),
    "equal but for the result": RESULT,
}


def test_every_row_has_an_example_and_a_name_of_its_own() -> None:
    assert [row.name for row in ROWS] == list(EXAMPLES)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_is_the_first_that_fits_its_example(row: Row) -> None:
    case = EXAMPLES[row.name]
    assert next(other for other in ROWS if other.fits(case)) is row
    found = judge_replay(case)
    assert found.verdict is row.verdict and found.why == row.words(case)
    assert found.again == (row.verdict in PLAYED_TWICE and case.plays_agree is None)
    assert "hardware" not in " ".join((found.why, *found.evidence))


def test_unexplained_says_what_no_record_holds_and_what_to_do_next() -> None:
    found = judge_replay(RESULT)
    assert found.why == "everything recorded is equal, the result is not: step 7, rank 0"
    assert "answers of the network" in found.evidence[-2] and "another node" in found.evidence[-1]


def test_a_verdict_of_an_older_version_is_shown_as_it_was_written(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "logs" / "r")
    with JournalWriter(paths) as writer:
        event = Replayed(verdict="hardware or race", why="step 7, rank 0", compared=1, start=4, replays=2, seconds=5.0)
        writer.write(event, launch=1, step=7, title="replay of step 7: hardware or race (step 7, rank 0)")
    text = render_markdown(read_story(paths), picture=False)
    assert "hardware or race: step 7, rank 0" in text


def test_a_launch_that_began_with_other_weights_is_played_twice_and_its_beginnings_are_compared() -> None:
    """The steps of two such plays differ anyway: what tells is whether they begin alike."""
    case = replace(OTHER_WEIGHTS, has_checkpoint=False, plays_agree=None)
    assert judge_replay(case).again

    def begun(weights: int) -> Played:
        rows = prints()
        rows[0] = {step: replace(one, weights=weights + step) for step, one in rows[0].items()}
        return played(rows)

    assert plays_agree(case, begun(1), begun(1)) is True
    assert plays_agree(case, begun(1), begun(2)) is False


def test_noise_in_results_says_nothing_of_what_enters() -> None:
    """On an accelerator two plays seldom have equal bits: a batch that is another one in the record is another one still."""
    found = judged(differing("batch"), prints(), differing("gradient", 5))
    assert found.verdict is ReplayVerdict.DATA
    assert judged(differing("gradient"), prints(), differing("gradient", 5)).verdict is ReplayVerdict.RANDOM

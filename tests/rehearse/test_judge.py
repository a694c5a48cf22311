"""What differs, and what it is called: files by the names of their leaves, logs by step, prints by their first difference."""

import math

import pytest

from chronicle.metrics.log import Point
from chronicle.prints.ring import Print, SeenParts
from chronicle.rehearse.judge import (
    Compared,
    Rank,
    Row,
    Sides,
    Verdict,
    compare_values,
    judge,
    judge_prints,
    logged_leaves,
)
from rollback.checks.leaves import LeafForm, Leaves, Value, measure


def numbers(**values: float | str) -> dict[str, Value]:
    return {
        name.replace("__", "."): Value(LeafForm.TEXT if isinstance(value, str) else LeafForm.NUMBER, value)
        for name, value in values.items()
    }


Series = dict[int, dict[str, float]]


def compared(first: Leaves, resumed: Leaves, *, again: Leaves | None = None, saved: Leaves | None = None) -> Compared:
    sides = Sides(first=first, again=again or first, resumed=resumed, saved=saved or {}, step=10)
    return compare_values(sides, ("resume",))


def logs(first: Series, again: Series, resumed: Series) -> Compared:
    one, twin, other = (logged_leaves([Point(step, step, 0.0, values) for step, values in series.items()], 0, 20)
                        for series in (first, again, resumed))  # fmt: skip
    return compared(one, other, again=twin)


def found(first: Leaves, resumed: Leaves, **more: Leaves) -> list[tuple[Rank, str, str]]:
    return [(row.rank, row.what, row.text) for row in compared(first, resumed, **more).findings]


def test_a_counter_that_began_anew_is_told_with_what_the_checkpoint_held() -> None:
    ((rank, what, text),) = found(numbers(ema__step=20), numbers(ema__step=10), saved=numbers(ema__step=10))
    assert (rank, what) == (Rank.ANEW, "ema.step")
    assert text == "20 → 10: it began anew at the resume; at step 10 it was 10"


def test_a_value_that_stands_where_it_stood_at_the_save_comes_before_what_follows_from_it() -> None:
    """A temperature of .99 a step, not loaded, is at step 20 what it was at step 10; losses and averages of them follow."""
    first, saved = numbers(temperature=0.818, mean=0.44), numbers(temperature=0.904, mean=0.41)
    (rank, what, text), (later, *_) = found(first, numbers(temperature=0.904, mean=0.43), saved=saved)
    assert (rank, what, later) == (Rank.ANEW, "temperature", Rank.STATE)
    assert text == "0.818 → 0.904: as it was at step 10; it began anew, or stands still"


def test_a_count_that_is_one_behind_after_one_did_not_begin_anew_for_certain() -> None:
    """MACE steps its scheduler one time less after a restart: 3 → 2, where the checkpoint held 1."""
    ((rank, _, text),) = found(numbers(epoch=3), numbers(epoch=2), saved=numbers(epoch=1))
    assert (rank, text) == (Rank.STATE, "3 → 2")


def test_values_of_one_list_are_one_finding() -> None:
    first = numbers(log__0__loss=1.0, log__1__loss=2.0, log__2__loss=3.0)
    ((rank, what, text),) = found(first, numbers(log__0__loss=1.0, log__1__loss=2.5, log__2__loss=3.5))
    assert (rank, what, text) == (Rank.STATE, "log.*.loss", "2 of 3 values differ, first `log.1.loss`: 2 → 2.5")


def test_what_two_undisturbed_launches_differ_in_is_nobodys_fault() -> None:
    first, again = numbers(loss=1.0, seconds=5.0), numbers(loss=1.001, seconds=7.0)
    assert found(first, numbers(loss=1.005, seconds=11.0), again=again) == []
    assert [what for _, what, _ in found(first, numbers(loss=1.2, seconds=5.0), again=again)] == ["loss"]


def test_a_leaf_that_is_missing_or_new_is_told_unless_it_comes_and_goes_anyway() -> None:
    assert [what for _, what, _ in found(numbers(a=1, b=2), numbers(a=1))] == ["b"]
    assert [what for _, what, _ in found(numbers(a=1), numbers(a=1, c=2))] == ["c"]
    assert found(numbers(a=1, b=2), numbers(a=1), again=numbers(a=1)) == []


def test_what_the_resume_was_asked_to_set_is_not_compared() -> None:
    assert found(numbers(args__resume="None"), numbers(args__resume="there")) == []


def test_what_could_not_be_read_is_a_row_and_no_equality() -> None:
    unread = {"odd.bin": Value(LeafForm.UNREAD, "no pickle")}
    files = compared(unread, unread)
    assert (files.of(Rank.UNSURE), files.num_leaves) == (("odd.bin: no pickle",), 0)


def test_what_is_another_one_in_every_launch_is_not_called_equal() -> None:
    """Without a seed the weights of A and A′ are far apart: that those of B are no farther says nothing of what was lost."""
    one, twin, other = ({"w": Value(LeafForm.TENSOR, name)} for name in "abc")
    files = compared(one, other, again=twin)
    assert (files.findings, files.of(Rank.UNSURE), files.num_leaves) == ((), ("w",), 0)
    first, again = ({step: {"loss": scale / step} for step in range(1, 21)} for scale in (1.0, 1.5))
    assert logs(first, again, again).of(Rank.UNSURE) == ("loss",)
    assert judge(Compared(rows=files.rows, num_leaves=9)) is Verdict.PARTLY


def test_bytes_that_are_others_in_every_launch_may_hold_state_beside_a_time() -> None:
    """`state.json.gz` has a time in its head. It was "differs by nature", and what it held was lost with exit 0."""
    one, twin, other = ({"state.json.gz": Value(LeafForm.DIGEST, name)} for name in "abc")
    files = compared({**one, **numbers(step=20)}, {**other, **numbers(step=20)}, again={**twin, **numbers(step=20)})
    assert (files.findings, files.of(Rank.UNSURE)) == ((), ("state.json.gz",)) and judge(files) is Verdict.PARTLY
    one, twin, other = (numbers(saved_at=name) for name in ("12:00", "12:01", "12:02"))
    files = compared({**one, **numbers(step=20)}, {**other, **numbers(step=20)}, again={**twin, **numbers(step=20)})
    assert judge(files) is Verdict.WITHIN, "a text is the whole value"


def test_where_a_tensor_is_another_one_in_every_launch_chance_names_no_other() -> None:
    """A and A′ were near each other by chance, and apart in a tensor: what they share is judged to one percent."""
    one, twin, other = ({"w": Value(LeafForm.TENSOR, name)} for name in "abc")
    first, again = numbers(near=1.0, same=1.0, count=20.0), numbers(near=1.0000001, same=1.0, count=20.0)
    lost = numbers(near=1.00001, same=1.000001, count=10.0)
    files = compared({**one, **first}, {**other, **lost}, again={**twin, **again})
    assert [row.what for row in files.findings] == ["count"]
    assert (files.of(Rank.UNSURE), files.of(Rank.NATURE)) == (("w",), ("near",))


def test_not_a_number_in_both_is_equal_and_in_one_is_not() -> None:
    one, other = numbers(best=math.nan), numbers(best=2.0)
    assert found(one, numbers(best=math.nan)) == []
    assert [what for _, what, _ in found(one, other)] == ["best"]


def test_a_logged_value_is_compared_with_the_spread_of_two_launches() -> None:
    first = {step: {"loss": 1 / step, "seconds": 0.1 * step, "lr": 1e-3} for step in range(1, 21)}
    again = {step: {"loss": 1 / step, "seconds": 0.3 * step, "lr": 1e-3} for step in range(1, 21)}
    late = {step: {"loss": 1 / step + 0.1 * (step > 12), "seconds": 9.0, "lr": 5e-4} for step in range(11, 21)}
    found = logs(first, again, late)
    assert [(row.rank, row.what) for row in found.findings] == [(Rank.LR, "lr"), (Rank.LOGGED, "loss")]
    assert "8 of 10 values differ, first `loss at step 13`" in found.findings[1].text
    assert (found.of(Rank.NOT_COMPARED), found.num_values) == (("seconds: measured anew in each launch",), 20)


def test_what_varies_at_all_beside_equal_losses_is_measured() -> None:
    """Two undisturbed launches were as fast as each other by chance, and the resumed one was slower: no state was lost."""
    first = {step: {"loss": 1 / step, "runtime": 0.2632} for step in range(1, 21)}
    again = {step: {"loss": 1 / step, "runtime": 0.2633} for step in range(1, 21)}
    late = {step: {"loss": 1 / step, "runtime": 0.2261} for step in range(11, 21)}
    found = logs(first, again, late)
    assert (list(found.findings), found.of(Rank.NOT_COMPARED)) == ([], ("runtime: measured anew in each launch",))


def prints(batches: dict[int, int], weights: dict[int, int] | None = None) -> dict[int, dict[int, Print]]:
    known = weights or {}
    seen = SeenParts.BATCH | SeenParts.WEIGHTS
    rows = {step: Print(step=step, seen=seen, batch=batch, weights=known.get(step, step)) for step, batch in batches.items()}
    return {0: rows}


def test_a_batch_that_was_read_before_says_that_the_data_begin_again() -> None:
    first = prints({step: 100 + step for step in range(1, 21)})
    resumed = prints({step: 90 + step for step in range(11, 21)})
    (one,) = judge_prints(first, first, resumed, (10, 20))
    assert one.rank is Rank.DATA
    assert one.text == "the batch of step 11 is the batch of step 1 of the undisturbed launch: the data begin again"
    assert "skip the batches" in one.advice
    (one,) = judge_prints(first, first, prints({step: 900 + step for step in range(11, 21)}), (10, 20))
    assert "a generator, a count, a stage" in one.advice, "no batch of the data: it was made otherwise"


def test_the_first_part_that_differs_names_the_cause_and_what_varies_anyway_does_not() -> None:
    steps = dict.fromkeys(range(1, 21), 5)
    first, resumed = prints(steps), prints(steps, dict.fromkeys(range(15, 21), 77))
    (one,) = judge_prints(first, first, resumed, (10, 20))
    assert one.text == "differs first at step 15, rank 0: weights"
    (natural,) = judge_prints(first, resumed, resumed, (10, 20))
    assert (natural.rank, natural.what) == (Rank.NATURE, "weights"), "A and A′ differ there, too"


@pytest.mark.parametrize(
    ("ranks", "leaves", "verdict"),
    [
        ((), 9, Verdict.EXACT), ((Rank.NATURE,), 9, Verdict.WITHIN), ((), 0, Verdict.NOT_DONE),
        ((Rank.MUST_DIFFER, Rank.NATURE), 9, Verdict.RANKS),
        ((Rank.LR,), 0, Verdict.DIFFERS), ((Rank.SIGNAL,), 9, Verdict.LOST), ((Rank.UNSURE, Rank.NATURE), 9, Verdict.PARTLY),
    ],
)  # fmt: skip
def test_exact_needs_files_that_were_compared(ranks: tuple[Rank, ...], leaves: int, verdict: Verdict) -> None:
    rows = tuple(Row(rank=rank, what="x") for rank in ranks)
    assert judge(Compared(rows=rows, num_leaves=leaves, num_values=10)) is verdict


def test_values_that_cannot_be_subtracted_are_infinitely_far_apart() -> None:
    one, other = Value(LeafForm.TEXT, "a"), Value(LeafForm.TEXT, "b")
    assert math.isinf(measure(one, other)[0]) and measure(one, one)[0] == 0


def test_with_other_ranks_their_files_and_counts_must_differ_and_rounding_is_allowed() -> None:
    first = numbers(**{"rng_0.pkl: a": 1, "rng_1.pkl: a": 1, "s.json: ranks": 2, "s.json: step": 20, "s.json: loss": 1.0})
    resumed = numbers(**{"rng_0.pkl: a": 5, "s.json: ranks": 1, "s.json: step": 15, "s.json: loss": 1.001})
    files = compare_values(Sides(first=first, again=first, resumed=resumed, saved={}, step=10), (), (2, 1))
    rounded = "1 values by less than 1 %: sums are rounded otherwise"
    assert files.of(Rank.MUST_DIFFER) == ("rng_0.pkl: a", "rng_1.pkl: a", "s.json: ranks", rounded)
    series = ({step: Point(step, step, 0.0, {"loss": loss}) for step in range(9, 21)} for loss in (1.0, 1.5))
    one, other = (logged_leaves(points.values(), after, 20) for points, after in zip(series, (9, 10), strict=True))
    logged = compare_values(Sides(first=one, again=one, resumed=other, saved={}, step=10), (), (2, 1))
    assert [row.what for row in logged.findings] == ["loss"] and not logged.of(Rank.MUST_DIFFER), "A logs one step more"
    assert [row.what for row in files.findings] == ["s.json: step"]


def test_a_logged_count_that_begins_anew_is_told_as_that() -> None:
    first = {step: {"tokens": 50.0 * step} for step in range(1, 21)}
    late = {step: {"tokens": 50.0 * (step - 10)} for step in range(11, 21)}
    (one,) = logs(first, first, late).findings
    assert one.rank is Rank.ANEW and one.text.endswith("it began anew at the resume; at step 10 it was 500")

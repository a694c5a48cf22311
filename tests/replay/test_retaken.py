"""Steps taken again: every row of the table once, from prints as rings hold them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from chronicle.prints.retaken import (
    ROWS,
    RankRetaken,
    RetakenCase,
    RetakenVerdict,
    Rise,
    find_segment,
    judge_retaken,
    retake_rank,
    rise_in,
)
from chronicle.prints.ring import Print, SeenParts, Segment

SEEN = (
    SeenParts.BATCH | SeenParts.GRADIENT | SeenParts.WEIGHTS | SeenParts.GENERATORS | SeenParts.OPTIONS | SeenParts.LOSS
)
V = RetakenVerdict


def step(number: int, rank: int = 0, **other: Any) -> Print:
    """A print whose parts follow from its step; batch, generator and loss are those of the rank."""
    own = number * 10 + rank
    values = {
        "batch": own,
        "gradient": number,
        "weights": number + 100,
        "torch": own,
        "options": 7,
        "lr": 0.1,
        "loss": own / 10,
    }
    return Print(step=number, seen=SEEN, batches=1, **{**values, **other})


def segment(rank: int = 0, last: int = 25, *, others: Mapping[int, Mapping[str, Any]] | None = None) -> Segment:
    """Steps 21 to `last` from the weights of step 20; `others`: fields of some steps."""
    begins = Print(step=20, seen=SeenParts.BEGINS | SeenParts.WEIGHTS, weights=120)
    steps = {number: step(number, rank, **(others or {}).get(number, {})) for number in range(21, last + 1)}
    return Segment(begins=begins, steps=steps)


def case(
    *ranks: Mapping[int, Mapping[str, Any]] | None, then: Mapping[int, Mapping[str, Any]] | None = None, **known: Any
) -> RetakenCase:
    """All ranks; each argument says what its rank has otherwise now. `then`: what the first launch had otherwise, rank 0."""
    before = [segment(rank, others=then if rank == 0 else None) for rank in range(len(ranks))]
    now = [segment(rank, others=other) for rank, other in enumerate(ranks)]
    found = [
        retake_rank(rank, before[rank], now[rank], hosts=(f"a{rank}", f"b{rank}"))
        for rank in range(len(ranks))
    ]
    values = {"earlier": 1, "start": 20, "ranks_then": len(ranks), "ranks_now": len(ranks), **known}
    return RetakenCase(ranks=found, **values)


def from_23(**other: Any) -> dict[int, dict[str, Any]]:
    """The same other fields at steps 23 to 25."""
    return dict.fromkeys((23, 24, 25), other)


OTHER_BITS = {n: {"gradient": 9, "weights": 9, "loss": n * (1 + 1e-7)} for n in range(21, 26)}
OTHER_RESULT = from_23(gradient=9, weights=9, loss=55.0)
CASES: Mapping[str, tuple[RetakenCase, RetakenVerdict, str]] = {
    "equal": (case(None, None), V.EQUAL, "steps 21–25 taken again: equal on 2 ranks"),
    "another number of ranks": (
        case(None, ranks_then=4),
        V.NOT_COMPARABLE,
        "4 ranks took these steps in launch 1, and 1 do now",
    ),
    "options": (
        case(from_23(options=8, lr=0.05, weights=9)),
        V.NOT_COMPARABLE,
        "not comparable from step 23 on: LR 0.1 then, 0.05 now; until then equal: batch, gradient, loss of step 23",
    ),
    "batches were skipped": (
        case(from_23(batch=9), skipped=True),
        V.NOT_COMPARABLE,
        "batches were skipped by the rollback",
    ),
    "generators": (case(from_23(torch=9)), V.NOT_COMPARABLE, "torch's generators stand elsewhere"),
    "batch": (case(from_23(batch=9), None), V.DATA, "not the same batches from step 23 on, on rank 0"),
    "a replica strayed": (
        case(None, from_23(weights=9), None),
        V.RANKS,
        "rank 1 of this launch holds other weights than the other 2 from step 23 on, and it held the same before: look at "
        "rank 1 on node b1",
    ),
    "the loss of some ranks": (
        case(*({23: {"gradient": 9, "weights": 9, "loss": 23.0 + rank / 10 + (rank == 1) * 0.2}} for rank in range(4))),
        V.RANKS,
        "the loss of rank 1 is another one at step 23",
    ),
    "the last digits": (
        case(
            *(
                {n: {"gradient": 9, "weights": 9, "loss": (n * 10 + rank) / 10 * (1 + 1e-7)} for n in range(21, 26)}
                for rank in range(3)
            )
        ),
        V.CLOSE,
        "the same batches and the same loss, but for 1e-07 of it (other bits from step 21 on, gradient)",
    ),
    "something has changed": (
        case(OTHER_RESULT, changed=[("code", "`/x/train.py` has changed")]),
        V.CODE,
        "another result from step 23 on; changed since launch 1: `/x/train.py` has changed",
    ),
    "some ranks": (
        case(None, {24: {"gradient": 9, "weights": 9}}),
        V.RANKS,
        "rank 1 differs from step 24 on (gradient); its batch was equal, and the other rank is equal to the last bit: look at "
        "rank 1 on node a1 then, b1 now, or at labels that do not come with the batch, which were not compared",
    ),
    "settings have changed": (
        case(OTHER_RESULT, changed=[("environment", "variable `X` is new")]),
        V.CODE,
        "changed since launch 1: variable `X` is new",
    ),
    "the result alone": (
        case(OTHER_RESULT),
        V.RESULT,
        "another result from step 23 on, every rank (gradient), the same batches",
    ),
}


def with_weights(one: RetakenCase, equal: bool | None) -> RetakenCase:
    return replace(one, ranks=[replace(rank, begins_equal=equal) for rank in one.ranks])


BEGINS_OTHERWISE = with_weights(case(None), False)
NO_RESULT = replace(
    case(None), ranks=[RankRetaken(rank=0, steps=(21, 22, 23), last_step=23, parts=frozenset({"batch"}))]
)
CASES = {
    **CASES,
    "other weights to begin with": (
        BEGINS_OTHERWISE,
        V.NOT_COMPARABLE,
        "the weights of step 20 are not those that launch 1 had",
    ),
    "no result in the prints": (NO_RESULT, V.NOT_COMPARABLE, "the prints hold no gradient, loss or weights"),
}


def test_a_replica_that_had_drifted_before_the_checkpoint_is_said() -> None:
    """A checkpoint has the weights of one rank: another one that held others has them no more."""
    one = case(None, None, None)
    words = "not comparable: rank 1 had other weights at step 20 of launch 1 than now"
    for begins, more in (((7, 8, 9), ""), ((7, 7, 7), ", when all ranks have the same: replicas had drifted apart")):
        ranks = [replace(rank, begins=begins[rank.rank], begins_equal=rank.rank != 1) for rank in one.ranks]
        found = judge_retaken(replace(one, ranks=ranks))
        assert (found.verdict, found.why) == (V.NOT_COMPARABLE, words + more)


def test_another_batch_is_told_behind_other_bits_of_a_sum() -> None:
    """From three ranks on the first step after a start has other bits: they are not what differs."""
    one = case({**OTHER_BITS, **{n: {**OTHER_BITS[n], "loss": 55.0} for n in (23, 24, 25)}})
    assert judge_retaken(one).verdict is V.RESULT
    other = case({**OTHER_BITS, **{n: {**OTHER_BITS[n], "loss": 55.0, "batch": 9} for n in (23, 24, 25)}})
    found = judge_retaken(other)
    words = "not the same batches from step 23 on (other bits before it: gradient)"
    assert (found.verdict, found.why) == (V.DATA, words)
    assert judge_retaken(replace(other, skipped=True)).verdict is V.NOT_COMPARABLE


def test_another_batch_names_what_was_changed_between_the_launches() -> None:
    """The code that makes batches, or settings of them: "not the same batches" alone sends a person to the loader's state."""
    found = judge_retaken(case(from_23(batch=9), changed=[("code", "`/x/collate.py` has changed")]))
    words = "not the same batches from step 23 on (changed since launch 1: `/x/collate.py` has changed)"
    assert (found.verdict, found.why) == (V.DATA, words)


@pytest.mark.parametrize("known", [SeenParts.TARGETS, SeenParts.TARGETS | SeenParts.LABELS])
def test_a_rank_is_named_without_a_doubt_where_labels_came_with_the_batch_by_their_name(known: SeenParts) -> None:
    """What a loader yields beside the inputs may be numbers of rows, by which the script looks labels up in a table."""
    then, now = [segment(0), segment(1)], [segment(0), segment(1)]
    now[1].steps[24] = step(24, 1, gradient=9, weights=9)
    for one in (*then, *now):
        for number, found in one.steps.items():
            one.steps[number] = replace(found, seen=SEEN | known)
    ranks = [retake_rank(rank, then[rank], now[rank]) for rank in (0, 1)]
    found = judge_retaken(RetakenCase(ranks=ranks, earlier=1, start=20, ranks_then=2, ranks_now=2))
    assert found.verdict is V.RANKS
    assert ("labels that do not come with the batch" in found.why) == (SeenParts.LABELS not in known)


def test_a_batch_that_was_made_anew_on_one_side_is_another_one_though_its_labels_are_not_known() -> None:
    """A flip that the script decides by chance: the loader's batch in one launch, a tensor of its own in the other."""
    then, now = [segment(0), segment(1)], [segment(0), segment(1)]
    for one in (*then, *now):
        for number, found in one.steps.items():
            one.steps[number] = replace(found, seen=SEEN | SeenParts.TARGETS)
    now[1].steps[23] = step(23, 1, batch=9, loss=55.0, gradient=9)
    ranks = [retake_rank(rank, then[rank], now[rank]) for rank in (0, 1)]
    found = judge_retaken(RetakenCase(ranks=ranks, earlier=1, start=20, ranks_then=2, ranks_now=2))
    assert (found.verdict, found.why) == (V.DATA, "not the same batches from step 23 on, on rank 1")
    for number in (23, 24, 25):
        now[1].steps[number] = replace(then[1].steps[number], seen=SEEN | SeenParts.TARGETS, labels=9)
    ranks = [retake_rank(rank, then[rank], now[rank]) for rank in (0, 1)]
    found = judge_retaken(RetakenCase(ranks=ranks, earlier=1, start=20, ranks_then=2, ranks_now=2))
    assert (found.verdict, found.why) == (V.DATA, "not the same labels from step 23 on, on rank 1")


def test_a_change_of_the_code_is_named_though_a_generator_stands_elsewhere() -> None:
    """Lightning restores none: what was changed on purpose comes before what nobody restores, where a result is another one."""
    moved = {n: {"torch": 9, "gradient": 9, "weights": 9, "loss": 55.0} for n in range(21, 26)}
    changed = [("code", "`/x/loss.py` has changed")]
    found = judge_retaken(case(moved, changed=changed))
    words = "another result from step 21 on; changed since launch 1: `/x/loss.py` has changed"
    assert (found.verdict, found.why) == (V.CODE, f"{words} (torch's generators stand elsewhere, too)")
    assert judge_retaken(case(from_23(torch=9), changed=changed)).verdict is V.NOT_COMPARABLE, "no result is another one"


def test_a_generator_that_stood_elsewhere_beside_equal_results_hides_nothing() -> None:
    """Accelerate's loader draws a seed at every start: without dropout that has no effect.

    What a rank draws is in its loss, and by the exchange in all gradients: one that differs on a rank alone was not drawn.
    """
    moved = {n: {"torch": 9} for n in range(21, 26)}
    fault = {**moved, 24: {"torch": 9, "gradient": 9}}
    assert judge_retaken(case(moved, moved)).verdict is V.EQUAL
    replicas = case(moved, fault)
    found = judge_retaken(replicas)
    assert (found.verdict, found.ranks) == (V.RANKS, (1,)) and "rank 1 differs from step 24 on (gradient)" in found.why
    drawn = case(moved, {**moved, 24: {"torch": 9, "loss": 55.0, "gradient": 9}})
    assert judge_retaken(drawn).verdict is V.RESULT, "a layer may have been left out by chance"
    alone = [replace(rank, weights={n: (n + rank.rank, n + rank.rank) for n in rank.weights}) for rank in replicas.ranks]
    found = judge_retaken(replace(replicas, ranks=alone))
    assert found.verdict is V.RESULT and "another result from step 24 on, rank 1 (gradient)" in found.why
    assert "torch's generators stand elsewhere, without effect before it" in found.why
    bits = {n: {**OTHER_BITS[n], "torch": 9} for n in OTHER_BITS}
    assert judge_retaken(case(bits)).verdict is V.CLOSE
    assert judge_retaken(case({n: {**bits[n], "loss": 55.0} for n in bits})).verdict is V.NOT_COMPARABLE
    batch = {n: {"torch": 9, "batch": 8} for n in range(21, 26)}
    assert judge_retaken(case(batch)).why == "not the same batches from step 21 on"


def test_every_row_has_its_case() -> None:
    assert {row.name for row in ROWS} == CASES.keys()


@pytest.mark.parametrize("name", CASES)
def test_row(name: str) -> None:
    one, verdict, words = CASES[name]
    assert next(row.name for row in ROWS if row.fits(one)) == name
    found = judge_retaken(one)
    assert (found.verdict, words in found.why) == (verdict, True), found.why


class TestNobodyIsNamed:
    """A machine is a strong word: each of these lacks something of the proof."""

    def test_a_generator_stands_elsewhere(self) -> None:
        one, _, _ = CASES["the loss of some ranks"]
        moved = [replace(rank, unrestored=("torch",)) for rank in one.ranks]
        assert judge_retaken(replace(one, ranks=moved)).verdict is V.RESULT

    def test_every_rank_differs(self) -> None:
        assert judge_retaken(case(OTHER_RESULT, OTHER_RESULT, OTHER_RESULT)).verdict is V.RESULT

    def test_one_rank_alone_trains(self) -> None:
        assert judge_retaken(case(OTHER_RESULT)).verdict is V.RESULT

    def test_no_step_before_it_is_equal(self) -> None:
        other = {number: {"gradient": 9, "weights": 9, "loss": 55.0} for number in range(21, 26)}
        assert judge_retaken(case(None, other)).verdict is V.RESULT

    def test_another_rank_left_no_prints(self) -> None:
        one = case(None, {24: {"gradient": 9, "weights": 9}})
        assert judge_retaken(replace(one, ranks_then=3, ranks_now=3)).verdict is not V.RANKS

    def test_the_gradient_of_a_sharded_state(self) -> None:
        one = case(None, {24: {"gradient": 9, "weights": 9}})
        sharded = [replace(rank, begins=rank.rank + 1, weights={}) for rank in one.ranks]
        assert judge_retaken(replace(one, ranks=sharded)).verdict is not V.RANKS

    def test_only_one_rank_logs_a_loss(self) -> None:
        def silent(rank: int) -> Segment:
            plain = segment(rank, others=from_23(gradient=9, weights=9, loss=55.0))
            hidden = {n: replace(p, seen=p.seen & ~SeenParts.LOSS) if rank else p for n, p in plain.steps.items()}
            return replace(plain, steps=hidden)

        before, now = [segment(rank) for rank in range(2)], [silent(rank) for rank in range(2)]
        ranks = [retake_rank(rank, before[rank], now[rank]) for rank in range(2)]
        assert (
            judge_retaken(RetakenCase(earlier=1, start=20, ranks=ranks, ranks_then=2, ranks_now=2)).verdict is V.RESULT
        )

    def test_other_bits_behind_equal_steps_are_not_called_close(self) -> None:
        assert judge_retaken(case({n: {"gradient": 9, "weights": 9} for n in (24, 25)})).verdict is V.RESULT

    def test_replicas_that_never_were_equal(self) -> None:
        own = {n: {"weights": n} for n in range(21, 26)}
        assert "other weights than" not in judge_retaken(case(None, own, None)).why

    def test_half_of_the_replicas_part_from_the_others(self) -> None:
        half = (*[from_23(gradient=9)] * 2, *[from_23(gradient=9, weights=9)] * 2)
        found = judge_retaken(case(*half))
        assert found.verdict is V.RESULT and "look at" not in found.why

    def test_replicas_that_go_their_own_ways_between_two_averages(self) -> None:
        """Local SGD: equal at the average, and each of its own in the steps between."""
        one = case(None, *(from_23(weights=rank) for rank in (1, 2, 3)))
        assert "other weights than" not in judge_retaken(one).why
        two = case(None, from_23(weights=9))
        held = [{n: (now, now) for n, (_, now) in rank.weights.items()} for rank in two.ranks]
        both = [replace(rank, weights=weights, apart=None) for rank, weights in zip(two.ranks, held, strict=True)]
        assert judge_retaken(replace(two, ranks=both)).verdict is V.EQUAL


class TestBatchesThatWereNotCompared:
    """A model that is called inside of the step leaves no batch in its prints: nothing is said of them, and nobody is named."""

    def without(self, *ranks: Any, **known: Any) -> RetakenCase:
        one = case(*ranks, **known)
        return replace(one, ranks=[replace(rank, parts=rank.parts - {"batch"}) for rank in one.ranks])

    def test_no_rank_is_named(self) -> None:
        found = judge_retaken(self.without(None, {24: {"gradient": 9, "weights": 9}}))
        assert found.verdict is V.RESULT and "batches not compared" in found.why

    def test_equal_says_what_was_not_compared(self) -> None:
        assert judge_retaken(self.without(None)).why == "steps 21–25 taken again: equal on 1 rank (batches not compared)"

    def test_no_loss_names_a_rank(self) -> None:
        one, _, _ = CASES["the loss of some ranks"]
        found = judge_retaken(replace(one, ranks=[replace(rank, parts=rank.parts - {"batch"}) for rank in one.ranks]))
        assert found.verdict is not V.RANKS and "batches not compared" in found.why

    def test_a_rise_tells_nothing(self) -> None:
        one = self.without(None)
        assert replace(one, rise=rise_in([Rise(onset=23, peak=24, excess=2.0)], one.ranks)).came_again is None

    def test_other_batches_later_name_nobody(self) -> None:
        one, _, _ = CASES["the loss of some ranks"]
        found = judge_retaken(replace(one, ranks=[replace(rank, other_batch=22) for rank in one.ranks]))
        assert found.verdict is not V.RANKS and "other batches from step 22 on" in found.why


class TestRise:
    RISE = Rise(onset=23, peak=24, excess=2.0)

    def of(self, *ranks: Any, then: Any = None) -> RetakenCase:
        one = case(*ranks, then=then)
        return replace(one, rise=rise_in([self.RISE], one.ranks))

    def test_came_again(self) -> None:
        assert judge_retaken(self.of(None)).why.endswith("the rise of step 23 came again: it is data × weights")

    def test_came_again_with_other_bits(self) -> None:
        found = judge_retaken(self.of({n: {"gradient": 9, "weights": 9, "loss": n + 0.3} for n in range(21, 26)}))
        assert found.verdict is V.RESULT and "came again: it is data × weights" in found.why

    def test_did_not_come_again(self) -> None:
        found = judge_retaken(self.of({n: {"gradient": 9, "weights": 9, "loss": 2.1} for n in range(23, 26)}))
        assert "the rise of step 23 did not come again, with the same batches: it is not the data alone" in found.why

    def test_other_batches_tell_nothing(self) -> None:
        assert self.of(from_23(batch=9)).came_again is None

    def test_behind_the_steps_that_both_took(self) -> None:
        assert rise_in([Rise(onset=30, peak=31, excess=1.0)], case(None).ranks) is None


class TestSegment:
    BEGINS = Print(step=20, seen=SeenParts.BEGINS | SeenParts.WEIGHTS, weights=120)

    def test_known_by_its_weights(self) -> None:
        older = Segment(begins=None, steps={n: step(n) for n in range(15, 30)})
        other = Segment(begins=None, steps={n: step(n, weights=5) for n in range(15, 30)})
        assert find_segment([older, other], self.BEGINS, is_known=False) is older

    def test_known_by_its_checkpoint(self) -> None:
        sparse = Segment(begins=None, steps={n: step(n) for n in range(16, 40, 8)})
        assert find_segment([sparse], self.BEGINS, is_known=False) is None
        assert find_segment([sparse], self.BEGINS, is_known=True) is sparse

    def test_nothing_behind_the_step(self) -> None:
        assert find_segment([Segment(begins=None, steps={20: step(20)})], self.BEGINS, is_known=True) is None

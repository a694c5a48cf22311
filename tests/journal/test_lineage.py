"""Lineage: every case of journal_and_interface §1.5, and the invariants that hold for any history."""

from collections.abc import Sequence
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from chronicle.journal import Entry, compute_lineage, read_journal
from tests.builders.story_runs import StoryRun, toy_run

Row = tuple[str, dict[str, object]]


def entry(index: int, kind: str, **fields: object) -> Entry:
    return Entry(id=f"E{index:04d}", ts="", run="r", writer="w", seq=index, prev="", kind=kind, **fields)  # type: ignore[arg-type]


def launches(*spans: tuple[int, int, int]) -> list[Entry]:
    """(number, start, last) one after another."""
    out: list[Entry] = []
    for number, start, last in spans:
        out.append(entry(len(out), "launch.start", launch=number, data={"start_step": start}))
        out.append(entry(len(out), "launch.end", launch=number, data={"last_step": last}))
    return out


def kept(entries: Sequence[Entry]) -> list[tuple[int, int, int]]:
    return [(i.launch, i.first, i.last) for i in compute_lineage(entries).kept]


def test_the_toy_run_keeps_1_to_5_of_the_first_launch_and_6_to_8_of_the_second(tmp_path: Path) -> None:
    toy = toy_run(tmp_path)
    lineage = compute_lineage(read_journal(toy.paths).entries)
    assert [(i.launch, i.first, i.last) for i in lineage.kept] == [(1, 1, 5), (2, 6, 8)]
    assert (lineage.head_launch, lineage.head_step) == (2, 8)
    assert lineage.launches[0].abandoned_after == 5
    assert lineage.contains(1, 5) and not lineage.contains(1, 6)


def test_a_start_before_the_predecessors_start_cuts_the_grandparent_too() -> None:
    """exp2 goes back to 14500, before the start (15611) of the launch it abandons."""
    assert kept(launches((1, 0, 15800), (2, 15611, 15700), (3, 14500, 16000))) == [(1, 1, 14500), (3, 14501, 16000)]


def test_two_rollbacks_to_the_same_step_keep_only_the_last() -> None:
    """exp3 and exp4 both go back to 16250."""
    assert kept(launches((1, 0, 16500), (2, 16250, 16400), (3, 16250, 20000))) == [(1, 1, 16250), (3, 16251, 20000)]


def test_a_launch_has_reached_its_highest_save_whatever_was_recorded_later() -> None:
    """A slow save of an earlier step may be recorded after a quick one of a later step."""
    rows = [entry(0, "launch.start", launch=1, data={"start_step": 0})]
    rows += [entry(1 + at, "checkpoint", launch=1, step=step, data={"path": f"{step}"}) for at, step in enumerate((10, 6))]
    assert kept(rows) == [(1, 1, 10)]


def test_a_restart_without_rollback_continues() -> None:
    assert kept(launches((1, 0, 20685), (2, 20685, 21000))) == [(1, 1, 20685), (2, 20686, 21000)]


def test_a_launch_that_ends_before_its_first_step_truncates_nothing() -> None:
    """It loaded step 5 and died: the weights on disk are still those of step 10."""
    rows = launches((1, 0, 10), (2, 5, 5))
    assert kept(rows) == [(1, 1, 10)]
    after = [entry(9, "launch.start", launch=3, data={"start_step": 10})]
    after.append(entry(10, "launch.end", launch=3, data={"last_step": 12}))
    assert kept([*rows, *after]) == [(1, 1, 10), (3, 11, 12)]


def test_a_launch_alive_before_its_first_step_stands_where_it_loaded() -> None:
    rows = [*launches((1, 0, 10)), entry(5, "launch.start", launch=2, data={"start_step": 5})]
    assert compute_lineage(rows).head_step == 5


def test_the_per_step_log_fills_in_what_a_killed_launch_could_not_say() -> None:
    rows = [entry(0, "launch.start", launch=1), entry(1, "launch.start", launch=2)]
    lineage = compute_lineage(rows, {1: (1, 10), 2: (6, 8)})
    assert [(i.launch, i.first, i.last) for i in lineage.kept] == [(1, 1, 5), (2, 6, 8)]


def test_an_explicit_parent_brings_back_that_launchs_own_history() -> None:
    """`rollback --to 8@1`: launch 2 branched off at 5, but the target is launch 1's step 8."""
    rows = launches((1, 0, 10), (2, 5, 20))
    rows.append(entry(8, "rollback.receipt", step=8, data={"parent_launch": 1}))
    rows.append(entry(9, "launch.start", launch=3, data={"start_step": 8}))
    rows.append(entry(10, "launch.end", launch=3, data={"last_step": 30}))
    assert kept(rows) == [(1, 1, 8), (3, 9, 30)]


def test_undo_brings_back_the_lineage_before_the_rollback() -> None:
    rows = launches((1, 0, 10))
    receipt = entry(4, "rollback.receipt", step=5)
    assert kept([*rows, receipt]) == [(1, 1, 5)]
    assert kept([*rows, receipt, entry(5, "undo.receipt", refs=(receipt.id,))]) == [(1, 1, 10)]


def test_a_refused_resume_does_not_say_where_the_launch_began() -> None:
    rows = [
        *launches((1, 0, 10)),
        entry(5, "launch.start", launch=2),
        entry(6, "guard.verdict", launch=2, step=5, data={"verdict": "refused"}),
        entry(7, "launch.end", launch=2, data={"last_step": None}),
    ]
    assert kept(rows) == [(1, 1, 10)]


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30)), min_size=1, max_size=25))
def test_kept_intervals_are_contiguous_ordered_and_never_beyond_what_ran(moves: list[tuple[int, int]]) -> None:
    rows: list[Entry] = []
    last_of: dict[int, tuple[int, int]] = {}
    for number, (start, length) in enumerate(moves, start=1):
        rows.append(entry(len(rows), "launch.start", launch=number, data={"start_step": start}))
        rows.append(entry(len(rows), "launch.end", launch=number, data={"last_step": start + length}))
        last_of[number] = (start, start + length)
    lineage = compute_lineage(rows)
    previous_last, previous_launch = -1, 0
    for interval in lineage.kept:
        start, last = last_of[interval.launch]
        assert start + 1 == interval.first <= interval.last <= last
        assert interval.first > previous_last and interval.launch > previous_launch
        previous_last, previous_launch = interval.last, interval.launch
    for span in lineage.launches:
        steps = range(last_of[span.number][0] + 1, last_of[span.number][1] + 1)
        alive = [s for s in steps if lineage.contains(span.number, s)]
        limit = span.abandoned_after if span.abandoned_after is not None else last_of[span.number][1]
        assert alive == [s for s in steps if s <= limit]


def test_ten_thousand_launches_fold_in_linear_memory() -> None:
    """Histories share their tails; a tuple per launch would hold 5·10^7 links."""
    rows = launches(*((n, (n - 1) * 10 - (3 if n > 1 else 0), n * 10) for n in range(1, 10_001)))
    lineage = compute_lineage(rows)
    assert lineage.head_step == 100_000
    assert len(lineage.kept) == 10_000


def test_launches_written_on_a_host_whose_clock_is_an_hour_slow_keep_their_order(tmp_path: Path) -> None:
    """The second host's ids are later than what its writer found in the journal, whatever its clock says."""
    from datetime import timedelta

    first = StoryRun(tmp_path)
    first.start(1, 0)
    first.end(1, 10)
    first.rollback(5, 0.5)
    slow = StoryRun(tmp_path, start=first.now - timedelta(hours=1))
    slow.start(2, 5)
    slow.end(2, 8)
    entries = read_journal(first.paths).entries
    assert [e.kind for e in entries][-2:] == ["launch.start", "launch.end"]
    assert compute_lineage(entries).head_step == 8
    assert entries[-1].ts < entries[0].ts  # the wall clock is kept as it was


def test_a_checkpoint_brought_back_from_what_was_put_aside_brings_its_history(tmp_path: Path) -> None:
    """exp10 of the seed goes back to a checkpoint of exp8, which exp9's rollback had abandoned."""
    run = StoryRun(tmp_path)
    run.start(1, 0)
    run.end(1, 20)
    first = run.rollback(10)
    run.start(2, 10)
    run.end(2, 30)
    source = f"/somewhere/abandoned/{first.refs[0]}/opt_step-15"
    run.rollback(15, source=source)
    run.start(3, 15)
    run.end(3, 40)
    lineage = compute_lineage(read_journal(run.paths).entries)
    assert [(i.launch, i.first, i.last) for i in lineage.kept] == [(1, 1, 15), (3, 16, 40)]
    assert lineage.rollbacks[-1].to_launch == 1


def guarded(number: int, start: int, last: int, loaded: dict[str, object] | None = None) -> list[Entry]:
    """A launch whose guard recorded what it loaded."""
    data = {"verdict": "passed", "checks": [], "moment": "before the first step", "run_id": "R"}
    data |= {"basis": "manifest", "loaded": loaded} if loaded else {"basis": "fresh"}
    return [
        entry(number * 10, "launch.start", launch=number),
        entry(number * 10 + 1, "guard.verdict", launch=number, step=start, data=data),
        entry(number * 10 + 2, "launch.end", launch=number, data={"last_step": last}),
    ]


def test_a_lineage_says_which_launch_it_had_to_guess_about() -> None:
    first = guarded(1, 0, 10)
    known = compute_lineage([*first, *guarded(2, 5, 8, {"run_id": "R", "launch": 1, "step": 5})])
    assert (known.inferred, known.guessed, known.doubt) == (False, (), "")
    guessed = compute_lineage([*first, *launches((2, 5, 8), (3, 8, 9))])
    assert (guessed.inferred, guessed.guessed) == (True, (2, 3))
    assert guessed.doubt == "inferred: no guard recorded what launch 3 and 1 more loaded"


def test_a_guess_that_was_abandoned_is_no_guess_about_the_present() -> None:
    side = launches((2, 5, 8))
    rows = [*guarded(1, 0, 10), *side, *guarded(3, 10, 12, {"run_id": "R", "launch": 1, "step": 10})]
    assert compute_lineage(rows).doubt == ""


def test_a_first_launch_from_step_0_loaded_nothing_that_could_be_guessed() -> None:
    assert compute_lineage(launches((1, 0, 10))).doubt == ""


def test_a_rollback_whose_target_names_no_launch_is_a_guess() -> None:
    rows = [*guarded(1, 0, 10), *guarded(2, 10, 12, {"run_id": "R", "launch": 1, "step": 10})]
    assert "rollback" in compute_lineage([*rows, entry(40, "rollback.receipt", step=5)]).doubt
    named = {"identity": {"run_id": "R", "launch": 1, "step": 5}}
    assert compute_lineage([*rows, entry(40, "rollback.receipt", step=5, data=named)]).doubt == ""


def test_no_launch_starts_before_its_first_step_was_step_0() -> None:
    """A stranger's log had steps 0, 5, 10: the start was inferred as -5, and the graph showed steps -4 to 30."""
    rows = [entry(0, "launch.start", launch=1), entry(1, "launch.step", launch=1, data={"start_step": -5})]
    rows.append(entry(2, "launch.end", launch=1, data={"last_step": 30}))
    assert kept(rows) == [(1, 0, 30)]


def test_a_copied_checkpoint_of_a_launch_beside_the_head_is_one_of_this_journal() -> None:
    """When the run was copied, its head was launch 1; launch 2 had gone aside, and the fork goes on from there."""
    parent = {"run_id": "P", "run": "p", "launch": 1, "step": 10, "last_launch": 2}
    rows = [
        *guarded(1, 0, 10),
        *guarded(2, 5, 9, {"run_id": "R", "launch": 1, "step": 5}),
        entry(20, "run.fork", step=10, data={"run_id": "R", "parent": parent, "copied": True}),
        *guarded(3, 8, 12, {"run_id": "P", "launch": 2, "step": 8}),
    ]
    assert kept(rows) == [(1, 1, 5), (2, 6, 8), (3, 9, 12)]

"""The plan is a pure value: complete, printable, refused when it would not do what was asked."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollback.checkpoint.layout import Checkpoint
from rollback.checkpoint.state import CheckpointState, OptimizerState, SchedulerState
from rollback.errors import PlanRefused
from rollback.lr.effect import Disproof, Proof, prove_ratio
from rollback.plan.plan import Plan, compose_plan, format_plan, plan_digest
from rollback.plan.request import Cost, InputFile, RollbackRequest, Source
from rollback.transaction.apply import memory_after, read_inputs, refuse_stale

EXPONENTIAL = {"gamma": 0.9, "base_lrs": [1.0, 0.5], "last_epoch": 1, "_step_count": 2, "_last_lr": [0.9, 0.45]}


def checkpoint(step: int, *, abandoned: str | None = None, launch: int | None = None) -> Checkpoint:
    folder = Path("/data") / ("abandoned/" + abandoned if abandoned else "checkpoints")
    return Checkpoint(
        path=folder / f"opt_step-{step}",
        step=step,
        step_source="name",
        format="accelerate",
        files=(),
        abandoned=abandoned,
        launch=launch,
    )


def state_of(
    target: Checkpoint, scheduler: dict[str, Any] | None = EXPONENTIAL, groups: Any = None, unit: int | None = 1
) -> CheckpointState:
    groups = groups or [{"lr": 0.9, "initial_lr": 1.0}, {"lr": 0.45, "initial_lr": 0.5}]
    schedulers = () if scheduler is None else (
        SchedulerState(file="scheduler.bin", prefix=(), state=scheduler, owner="prepared"),
    )  # fmt: skip
    optimizer = OptimizerState(file="optimizer.bin", prefix=(), groups=tuple(groups), steps=(1, 1))
    return CheckpointState(
        checkpoint=target, schedulers=schedulers, optimizers=(optimizer,), scheduler_unit=unit, optimizer_step=1
    )


def plan(request: RollbackRequest, *others: Checkpoint, **more: Any) -> Plan:
    target = more.pop("target", checkpoint(request.step))
    state = more.pop("state", state_of(target))
    inputs = (InputFile(path="optimizer.bin", fingerprint="sha256:ab"),)
    return compose_plan(
        request, target, [target, *others], state, run="tr", root="/data/checkpoints", inputs=inputs, **more
    )


def test_every_field_is_in_the_plan_with_before_and_after() -> None:
    edits = {(e.file, e.field): (e.before, e.after) for e in plan(RollbackRequest(step=500, lr_scale=0.5)).edits}
    assert edits == {
        ("scheduler.bin", "base_lrs.0"): (1.0, 0.5),
        ("scheduler.bin", "base_lrs.1"): (0.5, 0.25),
        ("scheduler.bin", "_last_lr.0"): (0.9, 0.45),
        ("scheduler.bin", "_last_lr.1"): (0.45, 0.225),
        ("optimizer.bin", "param_groups.0.lr"): (0.9, 0.45),
        ("optimizer.bin", "param_groups.0.initial_lr"): (1.0, 0.5),
        ("optimizer.bin", "param_groups.1.lr"): (0.45, 0.225),
        ("optimizer.bin", "param_groups.1.initial_lr"): (0.5, 0.25),
    }


def test_later_checkpoints_are_moved_in_the_order_of_their_steps() -> None:
    """The newest last: until then a loader that takes the newest sees what it saw before."""
    names = ["opt_step-600", "opt_step-1000", "opt_step-9000"]
    others = [checkpoint(9000), checkpoint(400), checkpoint(600), checkpoint(1000), checkpoint(700, abandoned="X")]
    assert [later.name for later in plan(RollbackRequest(step=500), *others).abandon] == names
    assert plan(RollbackRequest(step=500, keep_later=True), *others).abandon == ()


def test_copies_of_the_newest_follow_the_chosen_checkpoint() -> None:
    """`last.ckpt` of a later step always, of the same step when it is edited; never an earlier one, nor with --keep-later."""

    def last(step: int) -> Checkpoint:
        return replace(checkpoint(step), path=Path("/data/checkpoints/last.ckpt"), single_file=True)

    half = RollbackRequest(step=500, lr_scale=0.5)
    for request, step, copies in (
        (RollbackRequest(step=500), 750, ("last.ckpt",)),
        (RollbackRequest(step=500), 500, ()),
        (half, 500, ("last.ckpt",)),
        (half, 250, ()),
        (replace(half, keep_later=True), 750, ()),
        (replace(half, keep_later=True), 500, ("last.ckpt",)),
    ):
        made = plan(request, last(step), newest_copies=[last(step)])
        assert made.copies == copies and "last.ckpt" not in [later.name for later in made.abandon]
        assert ("last.ckpt becomes a copy of opt_step-500" in format_plan(made)) is bool(copies)
        assert plan_digest(json.loads(json.dumps(made.to_json()))) == made.digest


def test_forecast_of_a_prepared_scheduler_advances_by_its_unit() -> None:
    target = checkpoint(500)
    rows = plan(RollbackRequest(step=500), state=state_of(target, unit=2)).expected.next_lrs
    assert rows is not None
    assert rows[1] == (0.9 * 0.9 * 0.9, 0.45 * 0.9 * 0.9)


def test_unknown_unit_makes_the_forecast_unknown_and_not_the_ratio() -> None:
    expected = plan(RollbackRequest(step=500, lr_scale=0.5), state=state_of(checkpoint(500), unit=None)).expected
    assert (expected.next_lrs, expected.source, expected.ratio) == (None, Source.UNKNOWN, 0.5)


def test_forecast_recorded_at_save_is_scaled_when_nothing_can_be_computed() -> None:
    state = state_of(checkpoint(500), {"lr_lambdas": [None, None], **EXPONENTIAL} | {"gamma": None})
    lambdas = {key: value for key, value in state.schedulers[0].state.items() if key != "gamma"}
    state = replace(state, schedulers=(replace(state.schedulers[0], state=lambdas),))
    memory = {"next_lrs": [[0.9, 0.45], [0.8, 0.4]]}
    expected = plan(RollbackRequest(step=500, lr_scale=0.5), state=state, memory=memory).expected
    assert (expected.next_lrs, expected.source) == (((0.45, 0.225), (0.4, 0.2)), Source.STORED)
    manual = plan(RollbackRequest(step=500), state=state, memory=memory | {"lr_source": "manual"}).expected
    assert manual.source is Source.UNKNOWN


def test_known_next_lrs_are_promised_with_their_source() -> None:
    made = plan(RollbackRequest(step=500))
    rows = made.expected.next_lrs
    assert rows is not None
    for source in (Source.COMPUTED, Source.STORED):
        contract = replace(made, expected=replace(made.expected, source=source)).contract("R1")
        assert (contract["next_lrs"], contract["next_lrs_source"]) == ([list(row) for row in rows], str(source))


def test_manifest_of_an_edited_checkpoint_tells_the_lrs_that_memory_will_have() -> None:
    """The bounds of a cyclic schedule are in the groups as well."""
    groups = [{"lr": 0.9, "initial_lr": 1.0, "max_lr": 2.0, "min_lr": None}, {"lr": 0.45, "initial_lr": 0.5, "max_lr": 1.0}]
    after = memory_after({"groups": groups}, plan(RollbackRequest(step=500, lr_scale=0.5)))
    assert after["groups"] == [{"lr": 0.45, "initial_lr": 0.5, "max_lr": 1.0, "min_lr": None},
                               {"lr": 0.225, "initial_lr": 0.25, "max_lr": 0.5}]  # fmt: skip


def test_a_ratio_is_proved_to_nine_digits() -> None:
    exact, near = ({"lr": 0.5}, {"lr": 0.5 * (1 + 1e-6)})
    assert isinstance(prove_ratio(None, [{"lr": 1.0}], None, [exact], 0.5), Proof)
    assert isinstance(prove_ratio(None, [{"lr": 1.0}], None, [near], 0.5), Disproof)


def test_a_function_that_is_not_saved_is_not_foretold_from_arguments() -> None:
    """A lambda is not saved; arguments that the next launch may be given otherwise foretell nothing. The factor is proved."""
    scheduler = {"base_lrs": [1.0, 0.5], "last_epoch": 1, "_step_count": 2, "_last_lr": [0.9, 0.45], "lr_lambdas": [None, None]}
    state = replace(state_of(checkpoint(500), scheduler), config={"lr_scheduler_type": "linear", "max_steps": 10})
    made = plan(RollbackRequest(step=500, lr_scale=0.5), state=state)
    assert made.expected.source is Source.UNKNOWN and made.contract("R1")["next_lrs"] is None
    assert made.expected.ratio == 0.5 and made.expected.lrs == pytest.approx((0.45, 0.225))


def test_unknown_scheduler_class_is_refused_for_an_lr_and_not_for_a_plain_rollback() -> None:
    state = state_of(checkpoint(500), {"last_epoch": 1, "_step_count": 2, "base_values": [1.0], "warmup_t": 3})
    with pytest.raises(PlanRefused, match="no known scheduler class"):
        plan(RollbackRequest(step=500, lr_scale=0.5), state=state)
    assert plan(RollbackRequest(step=500), state=state).edits == ()


def test_deepspeed_scheduler_names_the_config() -> None:
    state = state_of(checkpoint(500), {"last_batch_iteration": 9})
    with pytest.raises(PlanRefused, match="config of the next launch, and the checkpoint records no scheduler") as caught:
        plan(RollbackRequest(step=500, lr_scale=0.5), state=state)
    assert "DeepSpeed config" in (caught.value.remedy or "")
    recorded = {"scheduler": {"type": "WarmupCosineLR", "params": {}}, "optimizer": {"params": {"lr": 1e-3}}}
    with pytest.raises(PlanRefused, match=r"`optimizer\.params\.lr` 0\.001 → 0\.0005"):
        plan(RollbackRequest(step=500, lr_scale=0.5), state=replace(state, config=recorded))
    assert plan(RollbackRequest(step=500), state=state).edits == ()


@pytest.mark.parametrize(
    "words, message",
    [
        ({"lr_scale": 0.5, "lr": 1e-4}, "both given"),
        ({"lr_scale": 0.0}, "positive"),
        ({"lr_scale": float("inf")}, "positive"),
        ({"lr_scale": float("nan")}, "positive"),
        ({"lr": -1e-4}, "positive"),
        ({"warmup_steps": -1}, "0 or more"),
    ],
)
def test_nonsense_is_refused_when_it_is_asked(words: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanRefused, match=message):
        RollbackRequest(step=500, **words)


def test_absolute_lr_for_groups_that_differ_is_refused_with_their_lrs() -> None:
    with pytest.raises(PlanRefused, match=r"0\.45, 0\.9"):
        plan(RollbackRequest(step=500, lr=1e-4))


def test_absolute_lr_from_zero_is_refused() -> None:
    state = state_of(checkpoint(500), None, [{"lr": 0.0, "initial_lr": 1e-3}])
    with pytest.raises(PlanRefused, match="the LR is 0 at this step"):
        plan(RollbackRequest(step=500, lr=1e-4), state=state)


def test_counter_that_ignores_the_number_of_processes_is_refused_with_the_right_value() -> None:
    scheduler = {"lr_lambdas": [None], "base_lrs": [1.0], "last_epoch": 900, "_step_count": 901, "_last_lr": [0.9]}
    state = state_of(checkpoint(500), scheduler, [{"lr": 0.9, "initial_lr": 1.0}], unit=2)
    with pytest.raises(PlanRefused, match="last_epoch=1000"):
        plan(RollbackRequest(step=500, sets={"last_epoch": 500}), state=state)
    edits = plan(RollbackRequest(step=500, sets={"last_epoch": 1000}), state=state).edits
    assert {(e.field, e.after) for e in edits} == {("last_epoch", 1000), ("_step_count", 1001)}


def test_pointer_keeps_the_white_space_of_its_writer() -> None:
    pointers = plan(RollbackRequest(step=500), pointers={"latest": "opt_step-900\n"}).pointers
    assert [(p.before, p.after) for p in pointers] == [("opt_step-900\n", "opt_step-500\n")]
    assert plan(RollbackRequest(step=500), pointers={"latest": "opt_step-500"}).pointers == ()


def test_bringing_back_an_abandoned_checkpoint_makes_its_launch_the_parent() -> None:
    target = checkpoint(500, abandoned="X", launch=8)
    made = plan(RollbackRequest(step=500, launch=8), checkpoint(500, launch=9), target=target, state=state_of(target))
    assert (made.parent_launch, made.displaces, made.source) == (8, True, "/data/abandoned/X/opt_step-500")


def test_digest_tells_plans_apart_and_survives_json() -> None:
    one = plan(RollbackRequest(step=500, lr_scale=0.5))
    other = plan(RollbackRequest(step=500, lr_scale=0.25))
    again = json.loads(json.dumps(one.to_json()))
    assert plan_digest(again) == one.digest != other.digest
    assert plan_digest(again | {"notes": ["another day"], "cost": {}}) == one.digest  # words, not deeds


@settings(deadline=None)
@given(scale=st.floats(1e-6, 1e6), steps=st.lists(st.integers(0, 10**6), max_size=5))
def test_any_plan_survives_json(scale: float, steps: list[int]) -> None:
    made = plan(RollbackRequest(step=500, lr_scale=scale), *map(checkpoint, steps), cost=Cost(steps=3, hours=0.5))
    written = json.loads(json.dumps(made.to_json()))
    assert plan_digest(written) == made.digest
    assert RollbackRequest.from_json(written["request"]) == made.request


@pytest.mark.parametrize(
    "odd",
    [
        *({"step": "x"}, {"step": True}, {"lr_scale": "2"}, {"sets": []}, {"sets": {"a": None}}, {"launch": []}),
        *({"unknown": 1}, {"accept_change": [1]}, {"accept_change": None}, {"keep_later": 1}, {"warmup_steps": 1.5}),
    ],
)
def test_a_request_that_somebody_forged_is_refused(odd: dict[str, Any]) -> None:
    record = RollbackRequest(step=500).to_json() | odd
    with pytest.raises(PlanRefused):
        RollbackRequest.from_json(record)


def test_a_plan_is_refused_when_its_files_changed_since(tmp_path: Path) -> None:
    """By content: a file of the same size with other bytes is another file."""
    state = tmp_path / "optimizer.bin"
    state.write_bytes(b"one")
    made = replace(plan(RollbackRequest(step=500)), inputs=read_inputs(tmp_path, ["optimizer.bin"]), root=str(tmp_path))
    refuse_stale(made, tmp_path)
    state.write_bytes(b"two")
    with pytest.raises(PlanRefused, match="changed after the plan was made"):
        refuse_stale(made, tmp_path)
    state.unlink()
    with pytest.raises(PlanRefused, match="was removed after the plan was made"):
        refuse_stale(made, tmp_path)


def test_plan_reads_like_this() -> None:
    """The golden text: one fact a line, before and after, what moves, what follows, what it costs."""
    made = plan(
        RollbackRequest(step=500, lr_scale=0.5), checkpoint(750), checkpoint(1000),
        pointers={"latest": "opt_step-1000"}, cost=Cost(steps=500, hours=6.25), has_manifest=True,
    )  # fmt: skip
    text = format_plan(made).replace(made.digest[:12], "PLAN")
    assert text == GOLDEN


GOLDEN = """\
rollback of run tr to step 500

  checkpoint  /data/checkpoints/opt_step-500  (accelerate)
  edit        scheduler.bin  (ExponentialLR, prepared)
                base_lrs.0  1 → 0.5
                base_lrs.1  0.5 → 0.25
                _last_lr.0  0.9 → 0.45
                _last_lr.1  0.45 → 0.225
  edit        optimizer.bin
                param_groups.0.lr          0.9 → 0.45
                param_groups.0.initial_lr  1 → 0.5
                param_groups.1.lr          0.45 → 0.225
                param_groups.1.initial_lr  0.5 → 0.25
  manifest    updated: digests of the edited files, expected LRs
  pointer     latest: opt_step-1000 → opt_step-500
  abandon     2 later checkpoints, moved to abandoned/, not deleted:
                opt_step-750  opt_step-1000
  LR          × 0.5 from the first step on, not proved: the first logged LRs settle what is assumed
  assumed     its update may not scale with the LR: the optimizer in `optimizer.bin` is of no known family (no fields)
  assumed     ExponentialLR is its library's own class; a subclass may hold an LR in its code
              next steps (computed from the checkpoint):
                +1   0.45  0.225
                +2   0.405  0.2025
                +3   0.3645  0.18225
                +4   0.32805  0.164025
                +5   0.295245  0.147623
                +20  0.0607883  0.0303942
  cost        500 steps, 6.2 h of training
  plan        PLAN"""


def test_a_warm_up_is_in_the_table_of_the_next_lrs() -> None:
    made = plan(RollbackRequest(step=500, warmup_steps=4), honours=frozenset({"warmup"}))
    table = format_plan(made).partition("next steps (computed from the checkpoint, under a warm-up over 4 steps):\n")[2]
    first, second, third, fourth = (float(line.split()[1]) for line in table.splitlines()[:4])
    rows = made.expected.next_lrs
    assert rows is not None
    assert [first, second, third, fourth] == pytest.approx([rows[i][0] * (i + 1) / 4 for i in range(4)], rel=1e-5)


def test_a_number_of_the_schedule_is_refused_with_the_reason() -> None:
    with pytest.raises(PlanRefused, match="computes its LRs from it, and not from it alone"):
        plan(RollbackRequest(step=500, sets={"gamma": 0.5}))

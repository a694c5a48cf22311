"""A resume that differs from its save is refused, unless the first pass itself was so before its next step (`reference.py`)."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import chronicle
from chronicle import ResumeRefused
from chronicle.journal import read_journal
from chronicle.paths import RunPaths
from chronicle.resume import beside, records
from chronicle.resume.allowed import Facts, allow
from chronicle.resume.checks.check import Outcome, failed
from chronicle.resume.contract import Expectation
from chronicle.resume.events import Saved, StepBegins
from chronicle.resume.lr_in_use import LrTripwire
from chronicle.resume.memory import Memory
from chronicle.resume.reference import Reference


class Loop:
    """A plain loop; `before(loop, step)` is the script's own code before a step. Every launch has new objects."""

    def __init__(
        self, top: Path, before: Callable[["Loop", int], None], *, lr: float = 0.1, kind: Any = torch.optim.SGD
    ) -> None:
        self.run_dir, self.path, self.before, self.lr, self.kind = top / "logs" / "tr", top / "state.pt", before, lr, kind
        self.plan: Callable[[Any], Any] | None = None  # makes a scheduler
        self.each = 1  # steps between two steps of the scheduler
        self.shrunk: Any = None  # the precision in which weights are saved

    def build(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.first, self.second = self.model[0], self.model[2]
        self.optimizer = self.kind(self.model.parameters(), lr=self.lr)
        self.scheduler = self.plan(self.optimizer) if self.plan else None
        chronicle.attach(str(self.run_dir), self.model, self.optimizer, self.scheduler)

    def launch(self, steps: range, *, save: int | None = None, before: Any = None) -> None:
        """Take `steps`, save when `save` of all steps are done, and end without a save."""
        self.build()
        if steps.start:
            state = torch.load(self.path, weights_only=False)
            self.model.load_state_dict({name: value.float() for name, value in state["model"].items()})
            self.optimizer.load_state_dict(state["optimizer"])
            if self.scheduler:
                self.scheduler.load_state_dict(state["scheduler"])
        for step in steps:
            (before or self.before)(self, step)
            self.step(step)
            if step + 1 == save:
                self.save()

    def step(self, step: int) -> None:
        self.model(torch.randn(4, 4, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.scheduler and (step + 1) % self.each == 0:
            self.scheduler.step()

    def save(self) -> None:
        weights = {name: value.to(self.shrunk or value.dtype) for name, value in self.model.state_dict().items()}
        state = {"model": weights, "optimizer": self.optimizer.state_dict()}
        torch.save({**state, "scheduler": self.scheduler and self.scheduler.state_dict()}, self.path)

    def verdict(self) -> dict[str, Any]:
        return dict(list(read_journal(RunPaths(self.run_dir)).of_kind("guard.verdict"))[-1].data)

    def noted(self) -> dict[str, str]:
        return {one["name"]: one["why"] for one in self.verdict()["noted"]}


def free_at_four(loop: Loop, step: int) -> None:
    loop.first.requires_grad_(step >= 4)


# ---- what the first pass changed before its next step ------------------------------------------------------------------


@pytest.mark.parametrize(("kept", "name"), [(None, "as rank 0"), (3, "as rank 0"), (None, "")])
def test_a_rank_that_kept_nothing_itself_reads_what_rank_0_kept(tmp_path: Path, kept: int | None, name: str) -> None:
    """Rank 3 did not save, as where the main process saves alone; of ranks beyond the eighth nothing is kept at all."""
    saved = Memory(frozen="2 of 6 (aa)", identity={"id": "one"})
    for rank in (0, *((kept,) if kept else ())):
        first_pass = Reference(tmp_path, rank, lambda: replace(saved, frozen="0 of 6 (bb)"))
        first_pass.saved(Saved(memory=saved))
        first_pass.step_begins(StepBegins(optimizer=None))
    found = replace(saved, frozen="0 of 6 (bb)" if name else "1 of 6 (cc)")
    wrong = failed("frozen parameters", "M3", expected=saved.frozen, found=found.frozen, where="requires_grad")
    for rank in (3, 12):
        expected = Expectation(basis="manifest", memory=saved)
        seen, alike, _ = Reference(tmp_path, rank, Memory).compare(expected, saved, found)
        facts = Facts(expected=expected, memory=saved, found=found, is_seen=seen, as_first=frozenset(alike))
        (check,) = allow([wrong], facts)
        assert check.outcome is (Outcome.NOTED if name else Outcome.DIFFERENT)


def test_layers_that_are_freed_right_after_the_save(tmp_path: Path) -> None:
    loop = Loop(tmp_path, free_at_four)
    loop.launch(range(6), save=4)
    loop.launch(range(4, 8))
    assert "so it was in the first pass" in loop.noted()["frozen parameters"]


def follow(loop: Loop, step: int) -> None:
    """A momentum encoder in the manner of BYOL: it follows before the model is called. `.data`: no version is counted."""
    loop.first.requires_grad_(False)
    loop.first.weight.data = 0.9 * loop.first.weight.data + 0.01


def test_weights_that_the_script_moves_between_its_load_and_its_first_batch(tmp_path: Path) -> None:
    loop = Loop(tmp_path, follow)
    loop.launch(range(6), save=4)
    loop.launch(range(4, 7), save=6)
    assert "so it was in the first pass" in loop.noted()["weights"]

    def elsewhere(loop: Loop, step: int) -> None:
        loop.first.weight.data = 0.8 * loop.first.weight.data

    with pytest.raises(ResumeRefused, match="weights"):
        loop.launch(range(6, 8), before=elsewhere)


def test_such_weights_where_the_run_stopped_right_at_its_save(tmp_path: Path) -> None:
    """What it did before an earlier step is known, so the weights are not compared."""
    loop = Loop(tmp_path, follow)
    loop.launch(range(4), save=2)
    loop.save()
    loop.launch(range(4, 6))
    assert "weights" in {one["name"] for one in loop.verdict()["not_compared"]}


class Sharp(Loop):
    """SAM as many write it: the weights are moved along the gradient, and the same is subtracted before the step."""

    def step(self, step: int) -> None:
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
        self.model(x).square().mean().backward()
        moved = [0.3 * p.grad / p.grad.norm() for p in self.model.parameters()]
        with torch.no_grad():
            for p, by in zip(self.model.parameters(), moved, strict=True):
                p.add_(by)
        self.optimizer.zero_grad()
        self.model(x).square().mean().backward()
        with torch.no_grad():
            for p, by in zip(self.model.parameters(), moved, strict=True):
                p.sub_(by)
        self.optimizer.step()
        self.optimizer.zero_grad()


def test_weights_that_are_moved_and_brought_back_before_the_first_step(tmp_path: Path) -> None:
    """The run stopped right at its save: how the first pass went on is not known, but only the last bits are others."""
    loop = Sharp(tmp_path, lambda loop, step: None)
    loop.launch(range(4))
    loop.save()
    loop.launch(range(4, 6))
    assert "as saved when the first batch came" in loop.noted()["weights"]


def test_layers_that_stay_frozen_although_the_first_pass_freed_them_before(tmp_path: Path) -> None:
    """`if epoch == 2: unfreeze()`: a resume after it trains the head alone."""
    loop = Loop(tmp_path, free_at_four)
    loop.launch(range(8), save=6)
    with pytest.raises(ResumeRefused, match="frozen parameters"):
        loop.launch(range(6, 8), before=lambda loop, step: loop.first.requires_grad_(False))


def test_freed_layers_that_are_others_than_those_of_the_first_pass(tmp_path: Path) -> None:
    loop = Loop(tmp_path, free_at_four)
    loop.launch(range(6), save=4)

    def wrong(loop: Loop, step: int) -> None:
        loop.second.requires_grad_(False)

    with pytest.raises(ResumeRefused, match="frozen parameters") as refused:
        loop.launch(range(4, 8), before=wrong)
    assert 'CHRONICLE_ACCEPT_CHANGE="frozen_parameters: why" accepts exactly this' in str(refused.value.remedy)


def test_parameter_group_that_is_added_after_the_save(tmp_path: Path) -> None:
    def unfreeze(loop: Loop, step: int) -> None:
        if step >= 4 and len(loop.optimizer.param_groups) < 2:
            loop.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))], "lr": 0.01})

    loop = Loop(tmp_path, unfreeze, kind=torch.optim.Adam, lr=0.01)
    loop.launch(range(6), save=4)
    loop.launch(range(4, 8))
    assert "parameter groups" in loop.noted()


def test_module_that_is_configured_anew_at_each_epoch(tmp_path: Path) -> None:
    """PointNet lowers the momentum of its batch norms, an argument of their constructor, every few epochs."""

    def colder(loop: Loop, step: int) -> None:
        loop.first.out_features = 8 if step < 4 else 9

    loop = Loop(tmp_path, colder)
    loop.launch(range(6), save=4)
    loop.launch(range(4, 8))
    assert any(name.endswith("out_features") for name in loop.noted())
    with pytest.raises(ResumeRefused, match="out_features"):
        loop.launch(range(4, 8), before=lambda loop, step: setattr(loop.first, "out_features", 7))


def test_rate_by_hand_that_reaches_the_constructors(tmp_path: Path) -> None:
    """The last step of a linear warm-up gives the LR that the optimizer was built with. A wiped LR gives it too."""

    def warm_up(loop: Loop, step: int) -> None:
        loop.optimizer.param_groups[0]["lr"] = 0.1 * min(1.0, (step + 1) / 5)

    loop = Loop(tmp_path, warm_up)
    loop.launch(range(7), save=4)
    loop.launch(range(4, 8))
    assert "learning rate per group" in loop.noted()
    short = Loop(tmp_path / "stopped", warm_up)  # ended right at its save: the next of four equal steps
    short.path.parent.mkdir()
    short.launch(range(4), save=4)
    short.launch(range(4, 8))
    assert "learning rate per group" in short.noted()


def test_rate_of_the_constructor_where_the_first_pass_went_on_otherwise(tmp_path: Path) -> None:
    def falls(loop: Loop, step: int) -> None:
        loop.optimizer.param_groups[0]["lr"] = 0.05 / (step + 1)

    loop = Loop(tmp_path, falls)
    loop.launch(range(7), save=4)
    with pytest.raises(ResumeRefused, match="learning rate"):
        loop.launch(range(4, 8), before=lambda loop, step: loop.optimizer.param_groups[0].update(lr=0.1))


def test_rate_that_goes_up_and_down_with_the_length_of_the_batch(tmp_path: Path) -> None:
    lengths = [1.0, 1.2, 0.9, 1.1, 0.8, 1.3, 1.0, 1.1, 0.95, 1.05, 1.15, 0.85]

    def scaled(loop: Loop, step: int) -> None:
        loop.optimizer.param_groups[0]["lr"] = 0.1 * lengths[step % len(lengths)]

    loop = Loop(tmp_path, scaled)
    loop.launch(range(10), save=9)
    loop.launch(range(9, 11), before=lambda loop, step: loop.optimizer.param_groups[0].update(lr=0.11))
    assert "learning rate per group" in loop.noted()


def test_layers_in_turn(tmp_path: Path) -> None:
    """LISA trains other layers every few steps, drawn at random."""

    def turn(loop: Loop, step: int) -> None:
        loop.first.requires_grad_(step // 2 % 2 == 0)
        loop.second.requires_grad_(step // 2 % 2 == 1)

    loop = Loop(tmp_path, turn)
    loop.launch(range(4), save=3)
    loop.launch(range(3, 7), save=5)
    loop.launch(range(5, 8), before=lambda loop, step: turn(loop, 2))
    assert "frozen parameters" not in {check["name"] for check in loop.verdict()["checks"] if not check["ok"]}


# ---- the fifty steps ---------------------------------------------------------------------------------------------------


def test_scheduler_that_is_stepped_once_in_some_steps_does_not_trip(tmp_path: Path) -> None:
    """A milestone in three steps of the scheduler is far away when it is stepped once an epoch."""
    loop = Loop(tmp_path, lambda loop, step: None)
    loop.plan, loop.each = (lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [10], 0.1)), 4
    loop.launch(range(6), save=5)
    loop.launch(range(5, 24))
    assert loop.verdict()["verdict"] != "refused"


def test_schedule_that_a_person_accepted_is_not_refused_a_step_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the LR from here on, by the scheduler's own base: refused, and with its name accepted for good."""

    def halved(loop: Loop, step: int) -> None:
        if step == 5:
            loop.scheduler.base_lrs = [0.05]
            loop.optimizer.param_groups[0]["lr"] *= 0.5

    loop = Loop(tmp_path, lambda loop, step: None)
    loop.plan = lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    loop.launch(range(6), save=5)
    with pytest.raises(ResumeRefused, match="learning rate"):
        loop.launch(range(5, 9), before=halved)
    monkeypatch.setenv("CHRONICLE_ACCEPT_CHANGE", "lr: halved; scheduler_state: halved")
    loop.launch(range(5, 12), before=halved)
    assert loop.verdict()["verdict"] != "refused"
    assert "accepted as `lr`" in loop.noted()["learning rate per group"]


def test_second_schedule_that_goes_on_where_the_first_one_ended(tmp_path: Path) -> None:
    wire = LrTripwire(rows=((0.1,),) * 20, source="scheduler")
    noted = [wire.feed((lr,)) for lr in (0.1, 0.0999, 0.0995, 0.099)]
    assert [check.outcome for check in noted if check] == [Outcome.NOTED]


def test_schedule_that_jumps_trips_and_one_at_another_speed_is_noted() -> None:
    rows = tuple((0.1 - 0.001 * step,) for step in range(20))
    twice = LrTripwire(rows=rows, source="scheduler")
    found = [twice.feed(row) for row in rows[:6:2]]
    assert [check.outcome for check in found if check] == [Outcome.NOTED]
    jump = LrTripwire(rows=((0.1,),) * 20, source="scheduler")
    assert [bool(jump.feed((lr,))) for lr in (0.1, 1.0)] == [False, True]


# ---- what the script's own save does not hold --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_weights_that_the_script_saves_in_half_precision_are_not_compared(tmp_path: Path, kind: Any) -> None:
    loop = Loop(tmp_path, lambda loop, step: None, kind=torch.optim.Adam)
    loop.shrunk = kind
    loop.launch(range(6), save=4)
    loop.launch(range(4, 8))
    assert "weights" in {one["name"] for one in loop.verdict()["not_compared"]}


def test_weights_of_another_step_are_refused(tmp_path: Path) -> None:
    loop = Loop(tmp_path, lambda loop, step: None, kind=torch.optim.Adam)
    loop.launch(range(6), save=4)
    state = torch.load(loop.path, weights_only=False)
    torch.save({**state, "model": {name: value + 1e-4 for name, value in state["model"].items()}}, loop.path)
    with pytest.raises(ResumeRefused, match="weights") as refused:
        loop.launch(range(4, 8))
    assert "CHRONICLE_ACCEPT_CHANGE" not in str(refused.value.remedy)  # saved state is restored, not accepted


def test_second_phase_with_an_optimizer_that_was_never_attached(tmp_path: Path) -> None:
    """Head first, then a new optimizer over everything: its resume is no start from scratch, and no verified one."""
    loop = Loop(tmp_path, lambda loop, step: None, kind=torch.optim.Adam, lr=0.01)
    loop.launch(range(6), save=4)
    first = loop.verdict()["verdict"]
    second = torch.optim.Adam(loop.model.parameters(), lr=1e-3)
    for _ in range(3):
        loop.model(torch.ones(2, 4)).sum().backward()
        second.step()
    state = copy.deepcopy({"model": loop.model.state_dict(), "optimizer": second.state_dict()})
    loop.build()  # a new process attaches the optimizer of its first phase, and does not use it
    again = torch.optim.Adam(loop.model.parameters(), lr=1e-3)
    loop.model.load_state_dict(state["model"])
    again.load_state_dict(state["optimizer"])
    loop.model(torch.ones(2, 4)).sum().backward()
    again.step()
    found = loop.verdict()
    assert (first, found["verdict"], found["verified"]) == ("passed", "unverified", False)
    assert "another optimizer than the attached one" in found["not_compared"][0]["why"]


def test_learning_rate_finder_gets_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop = Loop(tmp_path, lambda loop, step: None, kind=torch.optim.Adam, lr=0.01)
    loop.build()
    weights, state = copy.deepcopy(loop.model.state_dict()), copy.deepcopy(loop.optimizer.state_dict())
    for step in range(4):
        loop.optimizer.param_groups[0]["lr"] = 1e-5 * 2**step
        loop.step(step)
    loop.model.load_state_dict(weights)
    loop.optimizer.load_state_dict(state)
    capsys.readouterr()
    loop.step(0)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("chronicle")]
    assert line.endswith("(the state that was loaded: it is from before the first step: the optimizer begins anew)")


# ---- Accelerate ----------------------------------------------------------------------------------------------------------


def accelerated(run_dir: Path) -> tuple[Any, Any, Any]:
    from accelerate import Accelerator

    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    accelerator = chronicle.guard(Accelerator(cpu=True), run_dir=run_dir)
    return (accelerator, *accelerator.prepare(model, optimizer))


def train(accelerator: Any, model: Any, optimizer: Any) -> None:
    accelerator.backward(model(torch.ones(2, 4)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def test_file_of_the_script_that_it_overwrites_after_the_save(tmp_path: Path) -> None:
    """`save_state("last")` into one directory, and then a step counter beside it: the counter is no part of the save."""
    run_dir, last = tmp_path / "logs" / "tr", tmp_path / "last"
    accelerator, model, optimizer = accelerated(run_dir)
    for step in (9, 10):
        train(accelerator, model, optimizer)
        accelerator.save_state(str(last))
        (last / "step").write_text(str(step))
    accelerator, model, optimizer = accelerated(run_dir)
    accelerator.load_state(str(last))
    train(accelerator, model, optimizer)
    (last / "model.safetensors").write_bytes((last / "model.safetensors").read_bytes()[:-8])
    accelerator, model, optimizer = accelerated(run_dir)
    with pytest.raises(ResumeRefused, match=r"model\.safetensors"):
        accelerator.load_state(str(last))


def test_state_that_is_loaded_beside_a_guarded_accelerator_is_said(tmp_path: Path) -> None:
    run_dir = tmp_path / "logs" / "tr"
    accelerator, model, optimizer = accelerated(run_dir)
    train(accelerator, model, optimizer)
    state = copy.deepcopy((accelerator.unwrap_model(model).state_dict(), optimizer.state_dict()))
    accelerator, model, optimizer = accelerated(run_dir)
    accelerator.unwrap_model(model).load_state_dict(state[0])
    optimizer.load_state_dict(state[1])
    train(accelerator, model, optimizer)
    found = list(read_journal(RunPaths(run_dir)).of_kind("guard.verdict"))[-1].data
    assert (found["verdict"], found["verified"]) == ("unverified", False)


def test_what_is_kept_of_saves_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch that saves at every step leaves the newest few of its side files, and removes the others."""
    for module in (beside, records):
        monkeypatch.setattr(module, "NUM_KEPT", 3)
    loop = Loop(tmp_path, lambda loop, step: None, kind=torch.optim.Adam)
    loop.build()
    for step in range(9):
        loop.step(step)
        loop.save()
    counts = {name: len(list((loop.run_dir / name).iterdir())) for name in ("sequels", "gradients", "states")}
    assert counts == {"sequels": 3, "gradients": 3, "states": 3}

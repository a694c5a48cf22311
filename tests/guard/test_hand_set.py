"""What a script sets itself between the load and the first step is noted; what a resume lost is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import chronicle
from chronicle.journal import read_journal
from chronicle.paths import RunPaths

Rates = Callable[[int], float]  # LR by hand before each optimizer step


class Script:
    """A training loop that sets its options by hand; every launch has new objects, as a new process has."""

    def __init__(self, top: Path, *, lr: float = 0.1, kind: Any = torch.optim.SGD, **options: Any) -> None:
        self.run_dir, self.path, self.lr, self.kind, self.options = top / "logs" / "tr", top / "state.pt", lr, kind, options
        self.scheduler: Any = None  # made from the optimizer

    def launch(self, rates: Rates, steps: range, *, after_load: Any = None, each: Any = None, loads: bool = True) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))
        groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), **self.options.get("second", {})}]
        own = {name: value for name, value in self.options.items() if name != "second"}
        self.optimizer = self.kind(groups, lr=self.lr, **own)
        plan = self.scheduler(self.optimizer) if self.scheduler else None
        chronicle.attach(str(self.run_dir), model, self.optimizer, plan)
        if self.path.exists() and loads:
            state = torch.load(self.path, weights_only=False)
            model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            if after_load is not None:
                after_load(self.optimizer)
        for step in steps:
            for group in self.optimizer.param_groups if rates is not None else ():
                group["lr"] = rates(step)
            if each is not None:
                each(self.optimizer, step)
            model(torch.randn(4, 4, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        if hasattr(self.optimizer, "eval"):
            self.optimizer.eval()
        torch.save({"model": model.state_dict(), "optimizer": self.optimizer.state_dict()}, self.path)

    def verdict(self) -> dict[str, Any]:
        return dict(list(read_journal(RunPaths(self.run_dir)).of_kind("guard.verdict"))[-1].data)


def noted(script: Script) -> set[str]:
    found = script.verdict()
    assert found["verdict"] in ("passed", "unverified")
    return {one["name"] for one in found.get("noted", ())}


# ---- the script's own doing --------------------------------------------------------------------------------------------


def test_rate_that_is_annealed_after_the_save(tmp_path: Path) -> None:
    """PyTorch's word_language_model cuts its rate to a quarter when validation stalls, after the save."""
    script = Script(tmp_path)
    script.launch(lambda step: 0.1, range(6))
    script.launch(lambda step: 0.025, range(6, 12))
    assert noted(script) >= {"learning rate per group"}
    script.launch(lambda step: 0.00625, range(12, 18))
    assert noted(script) >= {"learning rate per group"}


def test_rate_that_is_annealed_inside_a_resumed_launch(tmp_path: Path) -> None:
    """Without a scheduler a constant rate is no plan: the fifty steps after a resume do not refuse its change."""
    script = Script(tmp_path)
    script.launch(lambda step: 0.1, range(6))
    script.launch(lambda step: 0.1 if step < 9 else 0.025, range(6, 12))
    assert script.verdict()["verdict"] in ("passed", "unverified")


def test_momentum_that_is_warmed_up_by_hand(tmp_path: Path) -> None:
    """As the record runs of nanoGPT do; it may also arrive at the constructor's value."""

    def warm(optimizer: Any, step: int) -> None:
        for group in optimizer.param_groups:
            group["momentum"] = 0.85 + 0.01 * min(step, 10)

    script = Script(tmp_path, momentum=0.95)
    script.launch(lambda step: 0.1, range(6), each=warm)
    script.launch(lambda step: 0.1, range(6, 10), each=warm)
    assert noted(script) >= {"momentum"}
    script.launch(lambda step: 0.1, range(10, 12), each=warm)
    assert noted(script) >= {"momentum"}


class ByEpoch:
    """Like timm's schedulers: sets the rate by itself, has no position, and `step` needs the epoch."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.step(0)

    def step(self, epoch: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 * (epoch / 2 if epoch < 2 else 1 - epoch / 10)

    def state_dict(self) -> dict[str, Any]:
        return {}


def test_scheduler_that_only_the_script_can_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The rate of the next epoch is set after the load; why the rates ahead are unknown is said in words."""
    script = Script(tmp_path)
    script.scheduler = ByEpoch
    for epoch in range(4):
        rate = 0.1 * (epoch / 2 if epoch < 2 else 1 - epoch / 10)
        script.launch(constant(rate), range(4 * epoch, 4 * epoch + 4))
        assert script.verdict()["verdict"] in ("passed", "unverified")
    said = capsys.readouterr().err
    assert "the `step` of ByEpoch needs arguments that only the script knows" in said and "TypeError" not in said


class TwoModes(torch.optim.SGD):
    """Like a schedule-free method: weights are others in evaluation mode."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group["train_mode"] = True

    def _switch(self, mode: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] is not mode:
                for p in group["params"]:
                    p.data.mul_(2.0 if mode else 0.5)
                group["train_mode"] = mode

    def train(self) -> None:
        self._switch(True)

    def eval(self) -> None:
        self._switch(False)


class TwoModesWithMomentum(TwoModes):
    """A schedule-free method has state, by which what was saved is known."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group["momentum"] = 0.9


def test_optimizer_with_a_mode_of_its_own(tmp_path: Path) -> None:
    """Saved in `optimizer.eval()`, trained in `optimizer.train()`: its weights are not compared, and nothing is refused."""
    script = Script(tmp_path, kind=TwoModes)
    script.launch(lambda step: 0.1, range(4))
    script.launch(lambda step: 0.1, range(4, 6), each=lambda optimizer, step: optimizer.train())
    found = script.verdict()
    assert noted(script) >= {"train_mode"}
    assert {one["name"] for one in found["not_compared"]} >= {"weights"}


def test_optimizer_with_a_mode_that_did_not_change(tmp_path: Path) -> None:
    """Then its weights are those of the save, and other ones are refused."""
    script = Script(tmp_path, kind=TwoModesWithMomentum)
    script.launch(lambda step: 0.1, range(4))
    state = torch.load(script.path, weights_only=False)
    state["model"]["0.weight"] += 1
    torch.save(state, script.path)
    with pytest.raises(chronicle.ResumeRefused, match="weights"):
        script.launch(lambda step: 0.1, range(4, 6))


class Unlimited(torch.optim.SGD):
    """An option that is infinite, as Prodigy's growth rate is: JSON has no number for it."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group["growth_rate"] = float("inf")


def test_option_that_is_infinite_is_restored(tmp_path: Path) -> None:
    script = Script(tmp_path, kind=Unlimited)
    script.launch(constant(0.1), range(4))
    script.launch(constant(0.1), range(4, 6))
    assert script.verdict()["verdict"] in ("passed", "unverified")


# ---- what a resume lost ------------------------------------------------------------------------------------------------


def constant(value: float) -> Rates:
    return lambda step: value


def falling(step: int) -> float:
    return 0.05 * (step + 1) / 4 if step < 4 else 0.05 * 0.97 ** (step - 4)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (constant(0.05), constant(0.1)),  # the constructor's
        (constant(0.05), constant(0.0)),  # wiped
        (constant(0.05), constant(0.4)),  # scaled once more
        (constant(0.05), constant(float("nan"))),
        (lambda step: 0.05 if step < 3 else 0.0125, constant(0.05)),  # from before it was annealed
        (falling, lambda step: falling(step - 12)),  # the counter was lost: the warm-up starts again
        (falling, lambda step: falling(step * 4)),  # counted in micro-batches: a function of the step has no reason to jump
    ],
    ids=["constructor", "zero", "scaled-again", "nan", "before-the-anneal", "warm-up-again", "micro-batches"],
)
def test_rate_that_was_lost_is_refused(tmp_path: Path, before: Rates, after: Rates) -> None:
    """Each of these was set after the load too, and none is the script's plan."""
    script = Script(tmp_path)
    script.launch(before, range(12))
    with pytest.raises(chronicle.ResumeRefused, match="learning rate"):
        script.launch(after, range(12, 14))


def test_rate_that_was_not_restored_is_refused(tmp_path: Path) -> None:
    """The checkpoint's rate never came back: nothing tells a plan from a loss."""
    script = Script(tmp_path)
    script.launch(constant(0.1), range(6))
    state = torch.load(script.path, weights_only=False)
    for group in state["optimizer"]["param_groups"]:
        group["lr"] = 0.03
    torch.save(state, script.path)
    with pytest.raises(chronicle.ResumeRefused, match="learning rate"):
        script.launch(constant(0.02), range(6, 8))


def test_rate_of_another_group_is_refused(tmp_path: Path) -> None:
    """The rates of the groups were lost, and one was used for all."""
    script = Script(tmp_path, second={"lr": 0.01})
    script.launch(None, range(6))
    with pytest.raises(chronicle.ResumeRefused, match="learning rate"):
        script.launch(constant(0.01), range(6, 8))


def test_option_that_never_moved_is_refused(tmp_path: Path) -> None:
    """A script's argument must not silently overrule the checkpoint."""
    script = Script(tmp_path, momentum=0.9)
    script.launch(constant(0.1), range(6))

    def set_momentum(optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["momentum"] = 0.8

    with pytest.raises(chronicle.ResumeRefused, match="momentum"):
        script.launch(constant(0.1), range(6, 8), after_load=set_momentum)


def test_rate_from_before_a_rollback_is_refused() -> None:
    """A later launch of a run that a rollback sent on with half the rate: twice the rate is the old one."""
    from chronicle.resume.allowed import undoes

    assert undoes(2.0, 0.1, 0.05) and not undoes(2.0, 0.1, 0.025) and not undoes(1.0, 0.1, 0.05)

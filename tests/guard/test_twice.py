"""`check_steps`: a step taken twice finds what a machine did once, changes nothing of the training, and accuses nobody."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import chronicle
from chronicle.errors import SettingsError
from chronicle.journal import read_journal
from chronicle.paths import RunPaths
from chronicle.prints.twice import KIND
from tests.guard.test_ranks import play

NUM_STEPS, EVERY, FAULTY = 14, 4, 12  # step 12 is a checked one
SIZE = 0.05  # of the fault: in bf16 a smaller one is rounded away


class Fault:
    """A machine that computes one number wrongly, once: `at` the step in which it does."""

    def __init__(self, at: int = 0) -> None:
        self.at, self.step, self.is_spent = at, 0, False

    def now(self) -> bool:
        if self.step != self.at or self.is_spent:
            return False
        self.is_spent = True
        return True

    def in_output(self, _module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
        if not self.now():
            return None
        wrong = output.clone()
        with torch.no_grad():
            wrong.view(-1)[3] += SIZE
        return wrong

    def in_gradient(self, gradient: torch.Tensor) -> torch.Tensor | None:
        if not self.now():
            return None
        wrong = gradient.clone()
        wrong.view(-1)[3] += SIZE
        return wrong


class Deep(nn.Module):
    """Dropout, running statistics, and a counter, a tensor and a list of its own that every pass moves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2)
        self.last = nn.Linear(16, 1)
        self.passes, self.seen = 0, torch.zeros(8)
        self.queue: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        self.seen.mul_(0.9).add_(x.detach().mean(0))
        self.queue.append(self.seen.clone())
        x = x + 0.1 * torch.stack(self.queue[-3:]).mean(0)
        return self.last(self.drop(torch.relu(self.norm(self.first(x)))))  # type: ignore[no-any-return]


class Random(Deep):
    """Draws from a generator that nobody else knows."""

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.Generator().manual_seed(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + torch.randn(x.shape, generator=self.own))


def train(
    run_dir: Path | None, model: nn.Module, fault: Fault, *, every: int = EVERY, accumulation: int = 1, **how: Any
) -> dict[str, Any]:
    """A plain loop; returns the state it ends with."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    attached = None if run_dir is None else chronicle.attach(run_dir, model, optimizer, check_steps=every)
    generator = torch.Generator().manual_seed(0)
    for fault.step in range(1, NUM_STEPS + 1):
        for _ in range(accumulation):
            x = torch.randn(6, 8, generator=generator)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=how.get("bf16", False)):
                out = model(x)
                twice = model(x.flip(0)) if how.get("pairs") else out
            ((out.float() + twice.float() - x.sum(1, keepdim=True)).square().mean() / accumulation).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=how.get("set_to_none", True))
    assert attached is not None or run_dir is None
    return {**model.state_dict(), **{name: getattr(model, name) for name in ("passes", "seen")}, "queue": len(model.queue)}


def told(run_dir: Path) -> list[tuple[int | None, str]]:
    entries = read_journal(RunPaths(run_dir)).of_kind("incident")
    return [(entry.step, str(entry.data["text"])) for entry in entries if entry.data.get("kind") == KIND]


@pytest.fixture
def make() -> Iterator[Callable[..., nn.Module]]:
    def made(kind: type[nn.Module] = Deep) -> nn.Module:
        torch.manual_seed(0)
        return kind()

    yield made


HEALTHY: list[dict[str, Any]] = [{}, {"accumulation": 3}, {"bf16": True}, {"pairs": True}, {"set_to_none": False}]


@pytest.mark.parametrize("how", HEALTHY, ids=str)
def test_a_healthy_training_ends_with_the_same_bits_and_nothing_is_said(
    run_dir: Path, make: Callable[..., nn.Module], how: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    alone = train(None, make(), Fault(), **how)
    checked = train(run_dir, make(), Fault(), every=1, **how)
    assert all(torch.equal(torch.as_tensor(alone[name]), torch.as_tensor(checked[name])) for name in alone)
    assert told(run_dir) == []
    assert "check_steps" not in capfd.readouterr().err
    assert not list(read_journal(RunPaths(run_dir)).of_kind("guard.fault"))


@pytest.mark.parametrize("how", HEALTHY[:3], ids=str)
def test_one_wrong_number_in_a_pass_is_named_with_step_and_rank(
    run_dir: Path, make: Callable[..., nn.Module], how: dict[str, Any]
) -> None:
    model, fault = make(), Fault(FAULTY)
    model.first.register_forward_hook(fault.in_output)  # type: ignore[union-attr]
    train(run_dir, model, fault, **how)
    ((step, text),) = told(run_dir)
    assert step == FAULTY and "rank 0 on " in text and "another output and gradient" in text
    assert "a third time it was as the second" in text and "go back to before this step" in text


def test_one_wrong_number_in_a_gradient_is_found(run_dir: Path, make: Callable[..., nn.Module]) -> None:
    model, fault = make(), Fault(FAULTY)
    model.first.weight.register_hook(fault.in_gradient)  # type: ignore[union-attr, operator]
    train(run_dir, model, fault)
    ((step, text),) = told(run_dir)
    assert step == FAULTY and "another gradient" in text


def test_the_second_time_may_be_the_wrong_one(run_dir: Path, make: Callable[..., nn.Module]) -> None:
    model, fault = make(), Fault(FAULTY)
    passes = iter(range(100))
    again = FAULTY + 4  # the first pass of step 12 is number 11 and four more: both trials, and the checks of steps 4 and 8

    def hook(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
        return output + SIZE if next(passes) == again else None

    model.first.register_forward_hook(hook)  # type: ignore[union-attr]
    train(run_dir, model, fault)
    ((step, text),) = told(run_dir)
    assert step == FAULTY and "a third time it was as the first: the second was odd" in text


def test_a_fault_in_a_step_that_is_not_checked_is_not_seen(run_dir: Path, make: Callable[..., nn.Module]) -> None:
    model, fault = make(), Fault(FAULTY - 1)
    model.first.register_forward_hook(fault.in_output)  # type: ignore[union-attr]
    train(run_dir, model, fault)
    assert told(run_dir) == []


def test_a_model_that_draws_by_itself_is_said_to_be_unrepeatable_and_is_not_accused(
    run_dir: Path, make: Callable[..., nn.Module], capfd: pytest.CaptureFixture[str]
) -> None:
    train(run_dir, make(Random), Fault())
    assert told(run_dir) == []
    assert "check_steps is off: the same step taken twice gives another output and gradient here" in capfd.readouterr().err


def test_two_networks_in_turn_are_not_accused(run_dir: Path, make: Callable[..., nn.Module]) -> None:
    """A GAN: the critic has moved when the generator's step is checked."""
    one, other = make(), nn.Linear(1, 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (one, other)]
    attached = chronicle.attach(run_dir, [one, other], optimizers, check_steps=1)
    for _ in range(NUM_STEPS):
        for optimizer in reversed(optimizers):
            other(one(torch.randn(6, 8))).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert attached is not None and told(run_dir) == []


def test_no_number_of_steps_is_refused_in_one_sentence(run_dir: Path, make: Callable[..., nn.Module]) -> None:
    with pytest.raises(SettingsError, match="check_steps is `often`: expected a number of steps"):
        train(run_dir, make(), Fault(), every="often")  # type: ignore[arg-type]


def test_the_trainer_of_transformers(tmp_path: Path, run_dir: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from chronicle.resume.transformers import ChronicleCallback
    from tests.guard.test_transformers import Regression, rows

    fault = Fault(FAULTY)

    class Count(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            fault.step = state.global_step + 1

    model = Regression()
    model.layer.register_forward_hook(fault.in_output)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=NUM_STEPS, per_device_train_batch_size=4, report_to=[], use_cpu=True,
        disable_tqdm=True, save_strategy="no", gradient_accumulation_steps=2,
    )  # fmt: skip
    callbacks = [ChronicleCallback(run_dir, check_steps=EVERY), Count()]
    transformers.Trainer(model=model, args=arguments, train_dataset=rows(), callbacks=callbacks).train()
    assert [step for step, _ in told(run_dir)] == [FAULTY]


def test_accelerate(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.guard.training import start

    monkeypatch.setenv("CHRONICLE_CHECK_STEPS", str(EVERY))
    fault, launch = Fault(FAULTY), start(run_dir)
    list(launch.model.modules())[-1].register_forward_hook(fault.in_output)
    for fault.step in range(1, NUM_STEPS + 1):
        launch.train(1)
    assert [step for step, _ in told(run_dir)] == [FAULTY]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_of_two_ranks_the_faulty_one_is_named(run_dir: Path, tmp_path: Path, how: str) -> None:
    told_by, _ = play(run_dir, tmp_path, how, worker_name="twice_worker.py")
    alone, healthy = told_by["alone"], told_by["healthy"]
    assert alone == healthy  # the same bits on each rank
    ((step, text),) = told(run_dir)
    assert step == FAULTY and "rank 1 on " in text

"""The guard never harms: strange optimizers and schedulers train on, its own errors stay inside, what it skips is said."""

import copy
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import chronicle
from chronicle.journal import read_journal
from chronicle.paths import RunPaths
from chronicle.resume.faults import or_else

REPOSITORY = Path(__file__).parents[2]


class EpochScheduler:
    """Like timm's: `step` needs the epoch, and no method or attribute has torch's name."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self, epoch: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = 0.01 / (1 + epoch)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        """It has no state."""


class ClosureScheduler(EpochScheduler):
    """Writes to the optimizer through a closure, so that a copy of it would change the real LR."""

    def __init__(self, optimizer: Any) -> None:
        def halve() -> None:
            for group in optimizer.param_groups:
                group["lr"] *= 0.5

        self._halve = halve

    def step(self, epoch: int = 0) -> None:
        self._halve()


def adafactor(parameters: Any) -> Any:
    return pytest.importorskip("transformers.optimization").Adafactor(parameters)


class PrivateOptimizer(torch.optim.Optimizer):
    """Like Opacus' `DPOptimizer`: no constructor of torch, and every step is the inner optimizer's."""

    def __init__(self, parameters: Any) -> None:
        self.original_optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    param_groups = property(lambda self: self.original_optimizer.param_groups)  # type: ignore[assignment]
    state = property(lambda self: self.original_optimizer.state)  # type: ignore[assignment]
    defaults = property(lambda self: self.original_optimizer.defaults)  # type: ignore[assignment]

    def step(self, closure: Any = None) -> Any:
        return self.original_optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.original_optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.original_optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.original_optimizer.load_state_dict(state_dict)


def launch(run_dir: Path, make: Any, scheduler: Any = None, *, load: Path | None = None, save: Path | None = None) -> Any:
    """Four steps of a small model; saves after the second."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = make(model.parameters())
    plan = None if scheduler is None else scheduler(optimizer)
    run = chronicle.attach(str(run_dir), model, optimizer, plan)
    if load is not None:
        state = torch.load(load, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    for step in range(2 if load else 0, 6):
        model(torch.randn(4, 8, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
        if plan is not None:
            plan.step(step)
        optimizer.zero_grad()
        if save is not None and step == 1:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, save)
    return run


def verdict(run_dir: Path) -> dict[str, Any]:
    return dict(list(read_journal(RunPaths(run_dir)).of_kind("guard.verdict"))[-1].data)


@pytest.mark.parametrize(
    ("make", "scheduler", "unknown"),
    [
        (adafactor, None, []),
        (lambda p: torch.optim.SGD(p, lr=1, momentum=0.9), None, []),
        (lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)), None, []),
        (PrivateOptimizer, None, []),
        (torch.optim.AdamW, EpochScheduler, ["learning rates of the next steps"]),
        (torch.optim.AdamW, ClosureScheduler, ["learning rates of the next steps"]),
    ],
    ids=["Adafactor", "int", "tensor", "Opacus", "step(epoch)", "closure"],
)
def test_strange_but_healthy_scripts_resume(run_dir: Path, tmp_path: Path, make: Any, scheduler: Any, unknown: Any) -> None:
    """An LR of None, a whole number, a tensor; schedulers that nobody can step: trained on, and what is unknown is said."""
    launch(run_dir, make, scheduler, save=tmp_path / "state.pt")
    launch(run_dir, make, scheduler, load=tmp_path / "state.pt")
    found = verdict(run_dir)
    assert [one["name"] for one in found.get("not_compared", []) if one["name"] != "next batch"] == unknown
    assert found["verdict"] in ("passed", "unverified") and (not unknown or found["verified"] is False)


def test_forecast_does_not_change_the_lr(run_dir: Path) -> None:
    """A copy of a scheduler may still reach the optimizer: its LR is as it was."""
    run = launch(run_dir, torch.optim.AdamW, ClosureScheduler)
    optimizer = run.session.training.observe().optimizers[0]
    before = optimizer.param_groups[0]["lr"]
    run.session.describe()
    assert optimizer.param_groups[0]["lr"] == before


def test_state_that_is_only_taken_is_not_described(run_dir: Path) -> None:
    """`optimizer.state_dict()` at every step is no save; after the first of them memory is described once in fifty steps."""
    run = launch(run_dir, torch.optim.AdamW)
    optimizer = run.session.training.observe().optimizers[0]
    for _ in range(200):
        optimizer.state_dict()
        optimizer.step()
    assert not list(read_journal(RunPaths(run_dir)).of_kind("guard.saved"))
    assert len(list((run_dir / "states").glob("weights-*"))) < 16 + 200 / 50


def test_state_written_after_further_steps_is_not_taken_for_either(run_dir: Path, tmp_path: Path) -> None:
    """Torch's state refers to tensors that have changed since: it is none that was recorded."""
    run = launch(run_dir, torch.optim.AdamW)
    live = run.session.training.observe()
    state = live.optimizers[0].state_dict()
    take_step(live.models[0], live.optimizers[0])
    torch.save(state, tmp_path / "state.pt")
    assert not list(read_journal(RunPaths(run_dir)).of_kind("guard.saved"))


def test_attach_after_the_load_is_said(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing can be compared, and "nothing was loaded" would not be true."""
    launch(run_dir, torch.optim.AdamW, save=tmp_path / "state.pt")
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True)["optimizer"])
    run = chronicle.attach(str(run_dir), model, optimizer)
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    assert run.session is not None and verdict(run_dir)["verdict"] == "unverified"
    assert "the optimizer was already at step 2 when `attach` was called" in capsys.readouterr().err


class Fragile(torch.nn.Linear):
    """A model that once cannot be asked for its parameters, when it is `broken`."""

    broken = False

    def parameters(self, recurse: bool = True) -> Any:
        if self.broken:
            self.broken = False
            raise RuntimeError("asked at a bad moment")
        return super().parameters(recurse)


def attached(run_dir: Path) -> tuple[Fragile, Any, Any]:
    """A guarded model and its optimizer."""
    model = Fragile(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer, chronicle.attach(str(run_dir), model, optimizer)


def take_step(model: Any, optimizer: Any) -> None:
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def wrong_resume(run_dir: Path) -> tuple[Fragile, Any, Any]:
    """Like `attached`, after a resume whose LR was lost: its first step is to be refused."""
    model, optimizer, _ = attached(run_dir)
    take_step(model, optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    model, optimizer, run = attached(run_dir)
    optimizer.load_state_dict(state)
    optimizer.param_groups[0]["lr"] = 0.2
    return model, optimizer, run


def test_error_of_one_session_refuses_no_step_of_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A guard that cannot tell whether a step is its own judges nothing that is pending, then or later, and says it once."""
    waiting, waiting_optimizer, run = wrong_resume(tmp_path / "logs" / "waiting")
    model, optimizer, _ = attached(tmp_path / "logs" / "other")
    waiting.broken = True
    take_step(model, optimizer)
    take_step(model, optimizer)
    take_step(waiting, waiting_optimizer)
    found = verdict(tmp_path / "logs" / "waiting")
    assert (found["verdict"], found["verified"]) == ("unverified", False)
    assert "asked at a bad moment" in found["not_compared"][0]["why"]
    assert run.session.faults.found == [("first step", "RuntimeError: asked at a bad moment")]
    assert verdict(tmp_path / "logs" / "other")["verdict"] == "passed"
    assert capsys.readouterr().err.count("this run is unverified") == 1


def test_refusal_stays_one_after_an_error(run_dir: Path) -> None:
    """A script that caught the refusal is refused again, also when the guard can no longer look; another's step is not."""
    model, optimizer, run = wrong_resume(run_dir)
    with pytest.raises(chronicle.ResumeRefused) as first:
        take_step(model, optimizer)
    model.broken = True
    other, its_optimizer, _ = attached(run_dir.parent / "other")
    take_step(other, its_optimizer)
    model.broken = True
    with pytest.raises(chronicle.ResumeRefused) as second:
        optimizer.step()
    assert second.value is first.value and run.session.faults.found


def test_type_error_inside_the_guard_is_an_error_of_the_guard() -> None:
    """Only a call that never began, because its arguments do not fit, is the script's mistake."""

    @or_else(lambda problem, *_: "otherwise")
    def work(number: int) -> int:
        return len(number)  # type: ignore[arg-type]

    assert work(1) == "otherwise"
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        work(1, other=2)  # type: ignore[call-arg]


def test_clipping_gets_its_parameters_though_the_guard_fails(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A generator of parameters can be read once: by torch, whatever the guard thinks of it."""

    def fail(*_: Any) -> None:
        raise TypeError("injected")

    model, optimizer, run = attached(run_dir)
    take_step(model, optimizer)
    monkeypatch.setattr("chronicle.resume.envelope.promises.Promises.clipped", fail)
    model(torch.ones(4, 8)).sum().backward()
    assert torch.nn.utils.clip_grad_norm_((p for p in model.parameters()), 1e-3) > 1e-3
    assert torch.cat([p.grad.reshape(-1) for p in model.parameters()]).norm() < 2e-3
    assert run.session.faults.found == [("envelope", "TypeError: injected")]


class WholeNumbers(torch.optim.Optimizer):
    """Keeps its moments as bytes, which torch's own `load_state_dict` turns into the parameter's type."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["sign"] = parameter.grad.sign().to(torch.int8)
            parameter.add_(state["sign"].float(), alpha=-0.01)


class Base(torch.optim.SGD):
    """An optimizer around another one, which it shares its groups with; the scheduler knows only the inner one."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.inner = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.inner.param_groups

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        self.inner.param_groups = self.param_groups


def halves(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer.inner, 3, 0.5)


@pytest.mark.parametrize(("make", "plan"), [(WholeNumbers, None), (Base, halves)], ids=["bytes", "inner optimizer"])
def test_optimizers_of_other_kinds_resume_verified(run_dir: Path, make: Any, plan: Any) -> None:
    saved: Any = None
    for start in (0, 2):
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 1)
        optimizer = make(model.parameters())
        scheduler = None if plan is None else plan(optimizer)
        run = chronicle.attach(str(run_dir), model, optimizer, scheduler)
        if saved is not None:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            if scheduler is not None:
                scheduler.load_state_dict(saved[2])
        for step in range(start, start + 6):
            model(torch.randn(4, 8, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()
            if step == 1 and saved is None:
                states = [None if one is None else one.state_dict() for one in (model, optimizer, scheduler)]
                saved = copy.deepcopy(states)
    assert run.session is not None
    assert (verdict(run_dir)["verdict"], verdict(run_dir)["verified"]) == ("passed", True)


def test_lr_that_is_cut_after_a_reload_in_the_process_is_noted(run_dir: Path) -> None:
    """The best model comes back with half of its LR, twice: the second time the LR is one that was used before."""
    model, optimizer, run = attached(run_dir)
    take_step(model, optimizer)
    best = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    for _ in range(2):
        take_step(model, optimizer)
        model.load_state_dict(best[0])
        optimizer.load_state_dict(copy.deepcopy(best[1]))
        optimizer.param_groups[0]["lr"] *= 0.5
        take_step(model, optimizer)
        assert verdict(run_dir)["verdict"] != "refused"
    assert "learning rate per group" in [one["name"] for one in verdict(run_dir)["noted"]]
    assert run.session is not None


def test_batch_size_that_grows_right_after_a_save_is_the_runs_own_plan(run_dir: Path, tmp_path: Path) -> None:
    """The launch that saved went on with larger batches: so may its resume, and no other size."""
    path = tmp_path / "state.pt"

    def train(sizes: list[int]) -> None:
        model, optimizer, run = attached(run_dir)
        resumed = path.exists()
        if resumed:
            state = torch.load(path)
            model.load_state_dict(state[0])
            optimizer.load_state_dict(state[1])
        for index, size in enumerate(sizes):
            if index == 4 and not resumed:
                torch.save((model.state_dict(), optimizer.state_dict()), path)
            model(torch.randn(size, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert run.session is not None

    train([4, 4, 4, 4, 8])
    train([8])
    assert verdict(run_dir)["verdict"] != "refused"
    with pytest.raises(chronicle.ResumeRefused, match="rows of a batch"):
        train([16])


class Momentum(torch.nn.Module):
    """Moves its frozen half inside the forward pass, as contrastive methods do."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = torch.nn.Linear(8, 1), torch.nn.Linear(8, 1).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for old, new in zip(self.key.parameters(), self.query.parameters(), strict=True):
                old.lerp_(new, 0.1)
        return self.query(x) - self.key(x)


@pytest.mark.parametrize("lost", [False, True])
def test_frozen_weights_that_the_first_pass_moves_are_no_loss(run_dir: Path, lost: bool) -> None:
    """They were as saved when the first batch came; a key that was not restored is still refused."""
    state: Any = None
    for _ in range(2):
        model = Momentum()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        run = chronicle.attach(str(run_dir), model, optimizer)
        if state is not None:
            part = {name: value for name, value in state[0].items() if not lost or "key" not in name}
            model.load_state_dict(part, strict=False)
            optimizer.load_state_dict(state[1])
        for _ in range(2):
            if state is not None and lost:
                with pytest.raises(chronicle.ResumeRefused, match="weights"):
                    take_step(model, optimizer)
                return
            take_step(model, optimizer)
        state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    assert run.session is not None
    assert "weights" in [one["name"] for one in verdict(run_dir)["noted"]]


def test_model_that_is_saved_whole_holds_nothing_of_the_guard(run_dir: Path, tmp_path: Path) -> None:
    """It is loaded where chronicle is not installed, trains on, and is saved again."""
    for _ in range(2):
        path = tmp_path / "model.pt"
        model = torch.load(path, weights_only=False) if path.exists() else torch.nn.Linear(8, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        run = chronicle.attach(str(run_dir), model, optimizer)
        take_step(model, optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.save(model, path)
        assert run.session.batches.has_seen
        assert b"chronicle" not in path.read_bytes()
    with torch.no_grad():
        torch.load(path, weights_only=False).eval()(torch.ones(2, 8))


@pytest.mark.slow
@pytest.mark.sample
def test_errors_in_the_guard_end_no_run_and_are_recorded() -> None:
    """A sample of `python -m tests.guard.guard_faults torch`: losses as without the error, and the error on record."""
    command = [sys.executable, "-m", "tests.guard.guard_faults", "torch", "--every", "60"]  # no other test's objects live there
    played = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=REPOSITORY, check=False)
    assert played.returncode == 0, played.stdout + played.stderr
    injected, ended, recorded = map(int, re.findall(r"(?:injected|ended|recorded) (\d+)", played.stdout))
    assert injected == recorded > 5 and ended == 0


def test_exception_of_the_scripts_own_signal_handler_passes(run_dir: Path) -> None:
    """A handler that raises while the guard happens to run ends what the script wants ended."""
    import signal

    class PreemptedError(Exception):
        pass

    def handler(number: int, frame: Any) -> None:
        raise PreemptedError

    run = launch(run_dir, torch.optim.AdamW)
    old = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(PreemptedError), run.session.contained("step"):
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, old)
    assert not run.session.faults.found


def test_run_directory_that_was_removed_is_no_noise_at_the_end(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import shutil, sys; from pathlib import Path; import torch; from tests.guard.test_never_harmful import launch\n"
        "launch(Path(sys.argv[1]), lambda params: torch.optim.SGD(params, lr=0.01)); shutil.rmtree(sys.argv[1])\n"
    )
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); exec(open({str(script)!r}).read())"]
    done = subprocess.run([*command, str(tmp_path / "run")], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")

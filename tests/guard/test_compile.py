"""Under `torch.compile` the guard adds no frame, no graph break and no recompile, and still sees the batches.

Counted with dynamo's own counters and the backend `eager`: what a backend makes of the graphs is the same afterwards.
"""

import copy
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo as dynamo
from torch._dynamo.testing import CompileCounter

import chronicle
from chronicle.journal import read_journal
from chronicle.paths import RunPaths
from chronicle.resume.batches import samples_of
from chronicle.resume.samples import digest_of

UNSEEN = r"not verified: memory \(the state that was loaded.*: no optimizer step was seen"


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 16), torch.nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(x)))


class Residual(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = torch.nn.Linear(8, 8), torch.nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.linear(x))


class Stack(torch.nn.Module):
    """Its blocks are compiled, and it is not."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.last = torch.nn.ModuleList([Residual(), Residual()]), torch.nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def sequence() -> torch.nn.Module:
    """Dynamo inlines a model that is a class of torch itself, hooks included."""
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    dynamo.reset()
    yield
    dynamo.reset()


def train(
    build: Callable[[], torch.nn.Module], how: str, when: str, run_dir: Path, *, fullgraph: bool = False
) -> tuple[dict[str, Any], Any]:
    """Six steps with a save and an evaluation in between; returns dynamo's counts and the guarded run."""
    dynamo.reset()
    dynamo.utils.counters.clear()
    compiler = CompileCounter()
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = chronicle.attach(run_dir, model, optimizer) if when == "before" else None
    call: Any = model
    step: Any = optimizer.step
    if how == "module":
        call = torch.compile(model, backend=compiler, fullgraph=fullgraph)
    elif how == "in place":
        model.compile(backend=compiler, fullgraph=fullgraph)
    elif how == "function":
        call = torch.compile(lambda x: model(x), backend=compiler, fullgraph=fullgraph)
    elif how == "blocks in place":
        for block in model.blocks:
            block.compile(backend=compiler, fullgraph=fullgraph)
    elif how == "blocks":
        for index, block in enumerate(model.blocks):
            model.blocks[index] = torch.compile(block, backend=compiler, fullgraph=fullgraph)
    elif how == "forward":
        model.forward = torch.compile(model.forward, backend=compiler, fullgraph=fullgraph)
    elif how == "backward too":

        @torch.compile(backend=compiler)
        def call(x: torch.Tensor) -> torch.Tensor:
            out = model(x)
            (out.square().mean() / 2).backward()
            return out

    elif how == "optimizer":
        step = torch.compile(lambda: optimizer.step(), backend=compiler)
    if when == "after":
        run = chronicle.attach(run_dir, call if how == "module" else model, optimizer)
    elif when == "after, inner":
        run = chronicle.attach(run_dir, model, optimizer)
    losses = []
    for index in range(6):
        loss = call(torch.randn(4, 8)).square().mean()
        if how != "backward too":
            loss.backward()
        step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if index == 2:
            optimizer.state_dict()
            model.eval()
            with torch.no_grad():
                (model if how == "backward too" else call)(torch.ones(4, 8))
            model.train()
    counters = dynamo.utils.counters
    counts = {
        "graphs": compiler.frame_count,
        "frames": dict(counters["frames"]),
        "breaks": sum(counters["graph_break"].values()),
        "limits": sum(counters["recompile_limit"].values()),
        "losses": losses,
    }
    return counts, run


CASES = [
    (Net, "module", "before", False),
    (Net, "module", "after", True),
    (Net, "module", "after, inner", False),
    (sequence, "module", "before", True),
    (sequence, "module", "after, inner", False),
    (Net, "in place", "before", True),
    (Net, "in place", "after", False),
    (sequence, "function", "before", True),
    (Stack, "blocks in place", "before", True),
    (Stack, "blocks in place", "after", True),
    (Stack, "blocks", "before", True),
    (Stack, "forward", "before", True),
    (Net, "backward too", "before", False),
]


@pytest.mark.parametrize(("build", "how", "when", "fullgraph"), CASES)
def test_guard_adds_no_frame_no_break_and_no_recompile(
    tmp_path: Path, build: Callable[[], torch.nn.Module], how: str, when: str, fullgraph: bool
) -> None:
    bare, _ = train(build, how, "never", tmp_path / "bare", fullgraph=fullgraph)
    guarded, run = train(build, how, when, tmp_path / "run", fullgraph=fullgraph)
    assert guarded == bare
    assert run.session.training.has_stepped
    if how not in ("function", "backward too"):
        torch.manual_seed(0)
        build()
        assert f"{run.session.data._first:016x}" == f"{digest_of(samples_of(torch.randn(4, 8))):016x}"


def test_compiled_optimizer_gets_no_break_from_the_guard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook on every optimizer step is inside the compiled step; on Python 3.13 it is called before it."""
    from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks

    with monkeypatch.context() as patch:
        for key in list(hooks):
            patch.delitem(hooks, key)
        bare, _ = train(Net, "optimizer", "never", tmp_path / "bare")
    guarded, _ = train(Net, "optimizer", "before", tmp_path / "run")
    is_inside = sys.version_info < (3, 13)
    num_broken = ("breaks", "frames")
    assert guarded == bare if is_inside else all(guarded[name] == bare[name] for name in bare if name not in num_broken)
    assert guarded["breaks"] <= bare["breaks"] and guarded["frames"]["total"] <= bare["frames"]["total"]


@pytest.mark.parametrize(("make", "steps"), [(torch.optim.AdamW, 4), (torch.optim.SGD, 257)], ids=["counters", "no counters"])
def test_resume_with_a_compiled_optimizer_says_that_nothing_is_compared(
    make: Any, steps: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No hook sees a step inside a graph; the optimizer's own counters show that there was one, or so many batches.

    On Python 3.13 the hook is called before the graph, so all is compared.
    """
    state: Any = None
    for launch in (1, 2):
        model = Net()
        optimizer = make(model.parameters(), lr=1e-3)
        run = chronicle.attach(tmp_path / "run", model, optimizer)
        step = torch.compile(optimizer.step, backend="eager")
        if launch == 2:
            model.load_state_dict(state[0])
            optimizer.load_state_dict(state[1])
        for _ in range(steps):
            model(torch.randn(4, 8)).square().mean().backward()
            step()
            optimizer.zero_grad()
        state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    assert run.session is not None
    said = len(re.findall(UNSEEN, capsys.readouterr().err))
    assert said == (sys.version_info < (3, 13))


def test_saves_of_a_compiled_optimizer_are_on_record_where_the_model_is_called_by_its_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither a batch nor a step is seen: the counters alone tell the state of a training from one made to be loaded into."""
    for launch in (1, 2):
        net = torch.nn.ModuleDict({"body": torch.nn.Linear(8, 8), "head": torch.nn.Linear(8, 1)})
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        run = chronicle.attach(tmp_path / "run", net, optimizer)
        step = torch.compile(optimizer.step, backend="eager")
        if launch == 2:
            state = torch.load(tmp_path / "state.pt", weights_only=False)
            net.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        for _ in range(3):
            net["head"](net["body"](torch.randn(4, 8))).square().mean().backward()
            step()
            optimizer.zero_grad()
        torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "state.pt")
    assert run.session is not None
    saves = [entry.data["step"] for entry in read_journal(RunPaths(tmp_path / "run")).of_kind("guard.saved")]
    assert saves == [3, 6]
    said = len(re.findall(UNSEEN, capsys.readouterr().err))
    assert said == (sys.version_info < (3, 13))


def test_compiled_model_of_accelerate_is_seen(tmp_path: Path) -> None:
    """`dynamo_backend` compiles in `prepare`, and what is prepared is what the guard watches."""
    from accelerate.utils import TorchDynamoPlugin

    from tests.guard.training import start

    plugin = TorchDynamoPlugin(backend="eager")
    counts = []
    for run_dir in (None, tmp_path / "run"):
        dynamo.reset()
        dynamo.utils.counters.clear()
        launch = start(run_dir, model=Net, accelerator_options={"dynamo_plugin": plugin})
        launch.train(3)
        counters = dynamo.utils.counters
        counts.append((dict(counters["frames"]), sum(counters["graph_break"].values())))
    assert counts[0] == counts[1]
    assert launch.accelerator.chronicle.data.position.endswith(":3")


def test_copy_of_a_compiled_model_is_not_watched(tmp_path: Path) -> None:
    model = Net()
    model.compile(backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = chronicle.attach(tmp_path / "run", model, optimizer)
    average = copy.deepcopy(model)
    average(torch.ones(4, 8))
    assert not run.session.batches.has_seen
    model(torch.ones(4, 8))
    assert run.session.batches.has_seen

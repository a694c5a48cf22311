"""accelerate #4295: `skip_first_batches` gives back a loader without the options of the first one."""

from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import set_seed

import chronicle
from tests.reproductions.case import Answer, Case, heard


def launch(folder: Path, guarded: bool, load: bool) -> tuple[bool, bool]:
    """Whether the loader in use drops the last batch and copies without waiting, before and after the skip."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    set_seed(0)
    accelerator = Accelerator(cpu=True)
    if guarded:
        chronicle.guard(accelerator, run_dir=folder / "logs" / "run")
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    data = torch.utils.data.TensorDataset(torch.arange(18.0).unsqueeze(1))
    plain = torch.utils.data.DataLoader(data, batch_size=4, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, plain)
    used = loader
    if load:
        accelerator.load_state(str(folder / "ck" / "step-2"))
        used = accelerator.skip_first_batches(loader, 2)
    for number, (batch,) in enumerate(used):
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if number == 1 and not load:
            accelerator.save_state(str(folder / "ck" / "step-2"))
    return loader._drop_last, used._drop_last


def bare(folder: Path) -> None:
    launch(folder, False, False)
    before, after = launch(folder, False, True)
    assert before and not after


def guarded(folder: Path) -> str:
    launch(folder, True, False)
    return heard(lambda: launch(folder, True, True), folder / "logs" / "run")


CASE = Case(
    row=15,
    source="accelerate #4295",
    pain="the loader of a resumed epoch has lost `drop_last` and others of its options",
    without="metrics of the last batch are gathered wrongly, and nothing says so",
    answer=Answer.NAMED,
    says=("(?i)drop.last",),
    bare=bare,
    guarded=guarded,
)

"""accelerate #2016: the documented recipe, resumed in the second epoch, trains on other batches than were left."""

from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import set_seed

import chronicle
from tests.reproductions.case import Answer, Case, heard


def launch(folder: Path, guarded: bool, load: bool) -> list[list[int]]:
    """Two epochs of eight batches, saved at step 11; or what comes after it."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    set_seed(0)
    accelerator = Accelerator(cpu=True)
    if guarded:
        chronicle.guard(accelerator, run_dir=folder / "logs" / "run")
    data = torch.utils.data.TensorDataset(torch.arange(16.0).unsqueeze(1))
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
    )
    seen: list[list[int]] = []

    def train(batch: list[torch.Tensor]) -> None:
        seen.append([int(value) for value in batch[0].flatten()])
        accelerator.backward(model(batch[0]).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    if load:
        accelerator.load_state(str(folder / "ck" / "step-11"))
        for batch in accelerator.skip_first_batches(loader, 3):
            train(batch)
        return seen
    for epoch in range(2):
        for number, batch in enumerate(loader):
            train(batch)
            if (epoch, number) == (1, 2):
                accelerator.save_state(str(folder / "ck" / "step-11"))
    return seen[11:]


def bare(folder: Path) -> None:
    assert launch(folder, False, False) != launch(folder, False, True)


def guarded(folder: Path) -> str:
    launch(folder, True, False)
    return heard(lambda: launch(folder, True, True), folder / "logs" / "run")


CASE = Case(
    row=9,
    source="accelerate #2016, #2823, #3242",
    pain="`load_state` and `skip_first_batches` in epoch 1 or later: samples repeated, others never seen",
    without="other batches than were left, and no word",
    answer=Answer.NAMED,
    says=("next batch(?!.*not on record)",),
    bare=bare,
    guarded=guarded,
)

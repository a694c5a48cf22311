"""meta-pytorch/data #1520: batches that were fetched ahead are counted as read and dropped at the resume."""

from pathlib import Path
from typing import Any

import torch

import chronicle
from tests.reproductions.case import Answer, Case, heard

AHEAD = 2


class Prefetched:
    """Reads two batches ahead of the training; its state is what was read, not what was trained."""

    def __init__(self, rows: torch.Tensor, first: int) -> None:
        self.rows, self.read = rows, first

    def __iter__(self) -> Any:
        waiting: list[torch.Tensor] = []
        while self.read < len(self.rows) or waiting:
            while self.read < len(self.rows) and len(waiting) <= AHEAD:
                waiting.append(self.rows[self.read])
                self.read += 1
            yield waiting.pop(0)


def launch(folder: Path, guarded: bool, load: bool) -> list[int]:
    torch.manual_seed(0)
    rows = torch.arange(24.0).reshape(24, 1, 1).expand(24, 4, 1)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    if guarded:
        chronicle.attach(folder / "logs" / "run", model, optimizer)
    first = 0
    if load:
        saved = torch.load(folder / "step-6.pt", weights_only=False)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["read"]
    loader, seen = Prefetched(rows, first), []
    for batch in loader:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(int(batch[0, 0]))
        if len(seen) == 6 and not load:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "read": loader.read}
            torch.save(state, folder / "step-6.pt")
    return seen if load else seen[6:]


def bare(folder: Path) -> None:
    left, came = launch(folder, False, False), launch(folder, False, True)
    assert came == left[AHEAD:]


def guarded(folder: Path) -> str:
    launch(folder, True, False)
    return heard(lambda: launch(folder, True, True), folder / "logs" / "run")


CASE = Case(
    row=13,
    source="meta-pytorch/data #1520",
    pain="batches that were fetched ahead are lost at a resume",
    without="two batches are never trained on and nothing says so",
    answer=Answer.NAMED,
    says=("next batch(?!.*not on record)",),
    bare=bare,
    guarded=guarded,
)

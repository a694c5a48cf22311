"""datasets #7447: a stream that was put back to its position starts there again in every later epoch."""

from pathlib import Path

import datasets
import torch

import chronicle
from tests.reproductions.case import Answer, Case, heard


def launch(folder: Path, guarded: bool, load: bool) -> list[int]:
    """Batches of each epoch: two epochs of eight batches, or the rest of the second and two more."""
    torch.manual_seed(0)
    rows = datasets.Dataset.from_dict({"a": [[float(number)] for number in range(32)]})
    stream, model = rows.to_iterable_dataset(num_shards=1).with_format("torch"), torch.nn.Linear(1, 1)
    loader = torch.utils.data.DataLoader(stream, batch_size=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    if guarded:
        chronicle.attach(folder / "logs" / "run", model, optimizer, data=loader)
    step, counts = 0, []
    if load:
        saved = torch.load(folder / "step-11.pt", weights_only=False)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        stream.load_state_dict(saved["stream"])
    for _ in range(3 if load else 2):
        counts.append(0)
        for batch in loader:
            model(batch["a"]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            counts[-1] += 1
            step += 1
            if step == 11 and not load:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "stream": stream.state_dict()}
                torch.save(state, folder / "step-11.pt")
    return counts


def bare(folder: Path) -> None:
    assert launch(folder, False, False) == [8, 8]
    assert launch(folder, False, True) == [5, 5, 5]


def guarded(folder: Path) -> str:
    launch(folder, True, False)
    return heard(lambda: launch(folder, True, True), folder / "logs" / "run")


CASE = Case(
    row=12,
    source="datasets #7447",
    pain="after a resume every later epoch of a stream holds only the rest",
    without="five batches an epoch instead of eight, for ever, and nothing says so",
    answer=Answer.STOPPED,
    says=("(?i)batch|epoch",),
    bare=bare,
    guarded=guarded,
)

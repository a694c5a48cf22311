"""datasets #7901: a shuffled stream loses its buffer at a resume, and those samples never come."""

from pathlib import Path

import datasets
import torch

import chronicle
from tests.reproductions.case import Answer, Case, heard


def launch(folder: Path, guarded: bool, load: bool) -> set[int]:
    """The samples that are trained after step 5."""
    torch.manual_seed(0)
    rows = datasets.Dataset.from_dict({"a": [[float(number)] for number in range(64)]})
    stream = rows.to_iterable_dataset(num_shards=1).shuffle(seed=42, buffer_size=16).with_format("torch")
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    if guarded:
        chronicle.attach(folder / "logs" / "run", model, optimizer)
    if load:
        saved = torch.load(folder / "step-5.pt", weights_only=False)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        stream.load_state_dict(saved["stream"])
    seen: list[set[int]] = []
    for batch in torch.utils.data.DataLoader(stream, batch_size=4):
        model(batch["a"]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append({int(value) for value in batch["a"].flatten()})
        if len(seen) == 5 and not load:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "stream": stream.state_dict()}
            torch.save(state, folder / "step-5.pt")
    return set().union(*(seen if load else seen[5:]))


def bare(folder: Path) -> None:
    left, came = launch(folder, False, False), launch(folder, False, True)
    assert left - came, "every sample came"


def guarded(folder: Path) -> str:
    launch(folder, True, False)
    return heard(lambda: launch(folder, True, True), folder / "logs" / "run")


CASE = Case(
    row=11,
    source="datasets #7901, #5454",
    pain="a shuffled stream restarts without the samples of its buffer",
    without="nine of 44 samples never come; datasets warns once, in general",
    answer=Answer.NAMED,
    says=("next batch(?!.*not on record)",),
    bare=bare,
    guarded=guarded,
)

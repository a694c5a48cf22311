"""A critic that takes three steps for each of its generator's: one count of steps, that of the optimizer named first."""

from pathlib import Path

import torch

import chronicle
from chronicle.journal import read_journal
from chronicle.paths import RunPaths


def launch(top: Path, turns: int) -> int:
    """Take so many turns from the newest state, save, and return the step that the guard knows."""
    torch.manual_seed(0)
    parts = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)]
    optimizers = [torch.optim.Adam(part.parameters()) for part in parts]
    run = chronicle.attach(str(top / "logs" / "gan"), parts, optimizers)
    path = top / "state.pt"
    if path.exists():
        for thing, state in zip((*parts, *optimizers), torch.load(path, weights_only=False), strict=True):
            thing.load_state_dict(state)
    for _ in range(turns):
        for number in (1, 1, 1, 0):
            parts[1](parts[0](torch.randn(4, 2))).mean().backward()
            optimizers[number].step()
            for one in optimizers:
                one.zero_grad()
    torch.save([one.state_dict() for one in (*parts, *optimizers)], path)
    return run.session.step or 0


def test_a_save_is_of_the_step_that_is_counted(tmp_path: Path) -> None:
    assert [launch(tmp_path, 2), launch(tmp_path, 3)] == [2, 5]
    entries = read_journal(RunPaths(tmp_path / "logs" / "gan"))
    assert [entry.step for entry in entries.of_kind("guard.saved")] == [2, 5]
    assert [entry.step for entry in entries.of_kind("guard.verdict")] == [0, 2]

"""The batch of one step, row by row, as a replay reads it: which row cost most, and whether its loss is what was logged."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from chronicle.resume.one_step import SHOW_VARIABLE, StepBatch, read_shown, tell_shown

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
ORIGINAL = functional.cross_entropy


def play(directory: Path, loss: Loss, *, rows: int = 6, micro: int = 1, masked: int = 0) -> tuple[list[torch.Tensor], float]:
    """Three steps of a classifier, the second one shown; the inputs of its micro-batches, and its loss."""
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3)
    shown = StepBatch(directory, {SHOW_VARIABLE: "2"}, lambda: None)
    seen: list[torch.Tensor] = []
    logged = math.nan
    for step in (1, 2, 3):
        values = []
        for _ in range(micro):
            x, y = torch.randn(rows, 5), torch.randint(0, 3, (rows,))
            x[3] *= 30
            y[:masked] = -100
            shown.enters(((x,), {}))
            value = loss(model(x), y) / micro
            value.backward()
            values.append(value.item())
            if step == 2:
                seen.append(ORIGINAL(model(x), y, reduction="none").detach())
        shown.stepping(step, 0)
        if step == 2:
            logged = sum(values)
        model.zero_grad()
    return seen, logged


def test_the_row_that_cost_most_is_named_with_its_loss(tmp_path: Path) -> None:
    rows, logged = play(tmp_path, lambda x, y: functional.cross_entropy(x, y), micro=2)
    assert functional.cross_entropy is ORIGINAL
    told = read_shown(tmp_path)
    assert told[0]["step"] == 2
    found = [loss for one in told[0]["losses"] for loss in one["rows"]]
    assert found == pytest.approx(torch.cat(rows).tolist(), rel=1e-5)
    lines = tell_shown(told, {0: logged})
    batch = int(max(rows[1]) > max(rows[0]))
    place = int(rows[batch].argmax())
    assert lines[0] == "batch of step 2: 12 rows in 2 micro-batches"
    assert "it gave the logged loss" in lines[1]
    assert lines[2].startswith(f"  row {place + 1} of micro-batch {batch + 1}: loss {max(rows[batch]):.4g}, target ")


def test_a_module_of_torch_is_seen_and_a_masked_row_has_no_loss(tmp_path: Path) -> None:
    _, logged = play(tmp_path, torch.nn.CrossEntropyLoss(), masked=2)
    told = read_shown(tmp_path)
    assert told[0]["losses"][0]["rows"][:2] == [None, None]
    lines = tell_shown(told, {0: logged})
    assert "it gave the logged loss" in lines[1]
    assert not any(line.startswith(("  row 1:", "  row 2:")) for line in lines)


def test_another_loss_than_the_logged_one_is_said(tmp_path: Path) -> None:
    _, logged = play(tmp_path, lambda x, y: functional.cross_entropy(x, y) + 1)
    assert f"is not the logged {logged:.6g}" in tell_shown(read_shown(tmp_path), {0: logged})[1]


def test_a_loss_of_the_scripts_own_is_not_known_and_rows_are_shown(tmp_path: Path) -> None:
    play(tmp_path, lambda x, y: (x.exp().sum(1).log() - x.gather(1, y[:, None])[:, 0]).mean())
    lines = tell_shown(read_shown(tmp_path), {0: 1.0})
    assert lines[1] == "the loss of each row is not known: the script called no loss function of torch that could be seen"
    assert lines[2].startswith("  row 1: 5 numbers, ")


def test_a_compiled_loss_keeps_its_one_graph(tmp_path: Path) -> None:
    breaks: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        breaks.append(1)
        return graph.forward

    shown = StepBatch(tmp_path, {SHOW_VARIABLE: "1"}, lambda: None)
    model = torch.nn.Linear(5, 3)
    compiled = torch.compile(lambda x, y: functional.cross_entropy(model(x), y), backend=backend, fullgraph=True)
    x, y = torch.randn(4, 5), torch.randint(0, 3, (4,))
    shown.enters(((x,), {}))
    compiled(x, y).backward()
    shown.stepping(1, 0)
    assert breaks == [1]

"""F11 by the bytes: what is not finite in a checkpoint is found, and what may be so for good reasons harms nothing."""

import pytest
import torch
from safetensors.torch import save_file

from rollback.checkpoint.listing import open_checkpoint
from rollback.checks.verify import passes, verify_checkpoint
from rollback.errors import Severity

NAN, INF = float("nan"), float("inf")
TYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def trained(optimizer=torch.optim.AdamW, dtype=torch.float32, **options):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8).to(dtype)
    optimizer = optimizer(model.parameters(), **{"lr": 1e-3} | options)
    for _ in range(3):
        model(torch.randn(2, 8, dtype=dtype)).sum().backward()
        optimizer.step()
    return model, optimizer


def found(path, state, *, full=True):
    torch.save(state, path)
    return [one for one in verify_checkpoint(open_checkpoint(path), full=full) if one.check == "F11"]


def state_of(model, optimizer):
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_one_element_that_is_not_finite_spoils_weights_and_moments(tmp_path, dtype, value):
    for place in ("weights", "moments"):
        model, optimizer = trained(dtype=dtype)
        assert found(tmp_path / "step_3.pt", state_of(model, optimizer)) == []
        with torch.no_grad():
            (model.weight if place == "weights" else optimizer.state[model.weight]["exp_avg"])[5, 3] = value
        (finding,) = found(tmp_path / "step_3.pt", state_of(model, optimizer))
        assert finding.severity is Severity.ERROR and ("weight" if place == "weights" else "exp_avg") in finding.message


def test_a_manifest_that_says_nothing_does_not_make_it_sound(tmp_path):
    """Without an optimizer that tells which shapes are trained, NaN in a state dict counts."""
    model, optimizer = trained(torch.optim.SGD)
    with torch.no_grad():
        model.bias[0] = NAN
    state = state_of(model, optimizer)
    assert not passes(found(tmp_path / "step_3.pt", state))


def test_masks_and_statistics_that_are_not_finite_for_good_reasons_spoil_nothing(tmp_path):
    """A causal mask, of a shape that is trained too; a statistic that is NaN until it is known; the largest finite weights."""
    model, optimizer = trained()
    with torch.no_grad():
        model.weight[0, 0] = torch.finfo(torch.float32).max
    extra = {"mask": torch.full((8, 8), -INF).triu(1), "best": torch.tensor(NAN), "history": torch.tensor([1.0, NAN])}
    state = state_of(model, optimizer)
    state["model"] |= extra
    notes = found(tmp_path / "step_3.pt", state)
    assert passes(notes) and [one.severity for one in notes] == [Severity.INFO] and "history" in notes[0].message


def test_weights_in_safetensors_beside_their_optimizer_are_read_too(tmp_path):
    """As Accelerate saves them."""
    model, optimizer = trained()
    with torch.no_grad():
        model.weight[1, 1] = NAN
    folder = tmp_path / "checkpoint_0"
    folder.mkdir()
    save_file(model.state_dict(), folder / "model.safetensors")
    torch.save(optimizer.state_dict(), folder / "optimizer.bin")
    findings = verify_checkpoint(open_checkpoint(folder), full=True)
    assert [one.path for one in findings if one.check == "F11" and one.severity is Severity.ERROR] == ["model.safetensors"]


def test_a_tensor_that_does_not_lie_in_one_piece_is_said_and_not_passed(tmp_path):
    """Every second column of a wider tensor: its elements have others between them."""
    model, optimizer = trained()
    state = state_of(model, optimizer)
    state["model"]["weight"] = torch.full((8, 16), NAN)[:, ::2]
    (note,) = found(tmp_path / "step_3.pt", state)
    assert note.severity is Severity.INFO and "model.weight" in note.message and "not looked for NaN" in note.message
    state["model"]["weight"] = model.weight.detach().T
    assert found(tmp_path / "step_3.pt", state) == []

"""The modern recipe: causal, counted by its formula, exact over a resume, and guarded in both of its optimizers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bit_transformer.data.loaders import StepDataset, open_stores, plan_data
from bit_transformer.errors import BadRecipe
from bit_transformer.modern import (
    SOURCES,
    Modern,
    ModernConfig,
    OtherOrder,
    build_optimizers,
    length_of,
    next_losses,
    parse_mixture,
    parse_positions,
    positions_from,
    probe_bpb,
)
from chronicle.data import Segments

SMALL = ["--width", "32", "--layers", "1", "--window", "32", "--batch", "4", "--steps", "12", "--eval-bytes", "1024"]


@pytest.fixture
def model() -> Modern:
    torch.manual_seed(0)
    made = Modern(ModernConfig(width=64, layers=2))
    for parameter in made.parameters():  # outputs begin at zero, which would hide everything
        torch.nn.init.normal_(parameter, std=0.1)
    return made


def test_a_logit_depends_on_its_own_and_earlier_symbols_only(model: Modern) -> None:
    symbols_BT = torch.randint(0, 256, (2, 24))
    changed = symbols_BT.clone()
    changed[:, 12:] = (changed[:, 12:] + 1) % 256
    before, after = model(symbols_BT), model(changed)
    assert torch.equal(before[:, :12], after[:, :12])
    assert (before[:, 12:] != after[:, 12:]).any(dim=-1).all()


def test_order_is_seen_and_place_is_not() -> None:
    """One layer sees an unordered set but for the rotary positions; among equal symbols every place is alike."""
    torch.manual_seed(0)
    model = Modern(ModernConfig(width=64, layers=1))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    one, other = model(torch.tensor([[1, 2, 3, 4]])), model(torch.tensor([[2, 1, 3, 4]]))
    assert not torch.allclose(one[:, -1], other[:, -1], atol=1e-3)
    same = model(torch.full((1, 16), 7))
    assert torch.allclose(same[:, 3], same[:, 12], atol=1e-4)


@pytest.mark.parametrize(("width", "layers", "vocab"), [(64, 2, 256), (96, 3, 256), (32, 1, 2)])
def test_parameters_are_counted_by_the_formula(width: int, layers: int, vocab: int) -> None:
    config = ModernConfig(width=width, layers=layers, vocab=vocab)
    assert sum(parameter.numel() for parameter in Modern(config).parameters()) == config.num_parameters


def test_each_parameter_has_one_optimizer_and_the_head_slows_with_the_width() -> None:
    model = Modern(ModernConfig(width=128, layers=2))
    muon, adamw = build_optimizers(model, matrix_lr=0.02, table_lr=0.01)
    owned = [id(p) for one in (muon, adamw) for group in one.param_groups for p in group["params"]]
    assert sorted(owned) == sorted(id(p) for p in model.parameters())
    assert [group["lr"] for group in adamw.param_groups] == [0.01, 0.005]


def test_a_new_model_knows_nothing(model: Modern) -> None:
    fresh = Modern(ModernConfig(width=64, layers=2))
    loss = next_losses(fresh, torch.randint(0, 256, (4, 16))).mean()
    assert loss.item() == pytest.approx(torch.log(torch.tensor(256.0)).item())


def test_positions_of_the_data_go_on_where_they_end() -> None:
    assert [at for at, _ in zip(positions_from(5, []), range(3), strict=False)] == [5, 6, 7]
    found = positions_from(0, parse_positions("4:6,4:5"))
    assert [next(found) for _ in range(5)] == [4, 5, 4, 5, 6]
    for bad in ("4", "6:4", "a:b", "-1:3"):
        with pytest.raises(BadRecipe, match="--data is"):
            parse_positions(bad)


def test_another_order_reads_the_same_samples_with_the_same_mixture_in_every_batch() -> None:
    stores = open_stores(SOURCES, 64, data_dir=None)
    parts = {"stores": stores, "rank": 0, "world_size": 1, "as_bytes": True}
    plan = plan_data(stores, SOURCES, batch_size=10, seed=3)
    plain = StepDataset(plan, Segments(), **parts)
    one, same, other = (OtherOrder(plan, Segments(), **parts).reorder([range(5, 15)], number) for number in (1, 1, 2))
    rows = [sorted(tuple(pair) for step in range(5, 15) for pair in data._ids(step).tolist()) for data in (plain, one, other)]
    assert rows[0] == rows[1] == rows[2]
    assert [one[step].digest for step in range(5, 15)] == [same[step].digest for step in range(5, 15)]
    for step in range(5, 15):
        assert plain[step].digest != one[step].digest != other[step].digest
        assert sorted(plain[step].sources_B.tolist()) == sorted(one[step].sources_B.tolist())
    assert one[15].digest == plain[15].digest  # beyond the part the plan goes on


def test_options_of_a_study() -> None:
    assert parse_mixture("code=3,reference=7") == {"code": 3, "reference": 7}
    for bad in ("code=3", "code=3,reference=0", "code=x,reference=1", "code=3,reference=7,c=1"):
        with pytest.raises(BadRecipe, match="--mixture is"):
            parse_mixture(bad)
    assert [length_of(number, 380) for number in (0, 0.01, 0.05, 12.0)] == [0, 4, 19, 12]


def test_the_probe_scores_the_same_bytes_with_and_without_context(model: Modern) -> None:
    texts = {name: torch.randint(0, 256, (4, 64), dtype=torch.uint8) for name in SOURCES}
    blind = Modern(ModernConfig(width=64, layers=1))  # a new model knows nothing: eight bits a byte, whatever it is given
    assert [probe_bpb(blind, texts, 256, k) for k in (0, 3)] == [pytest.approx(8.0), pytest.approx(8.0)]
    moved = {name: torch.cat([windows[:, :32].flip(1), windows[:, 32:]], dim=1) for name, windows in texts.items()}
    assert probe_bpb(model, texts, 256, 0) == probe_bpb(model, moved, 256, 0)
    assert probe_bpb(model, texts, 256, 3) != probe_bpb(model, moved, 256, 3)


def launch(where: Path, *words: str, code: int = 0) -> str:
    command = [sys.executable, "-m", "chronicle_ml", "run", "--run", "modern", "--logs", str(where / "logs"), "--checkpoints",
               str(where / "checkpoints"), "--", sys.executable, "-m", "bit_transformer.modern", *SMALL, *words]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=where, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_resume_is_exact_to_the_bit_and_a_lost_muon_state_is_refused(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for where in (whole, parts):
        where.mkdir()
    launch(whole)
    launch(parts, "--stop-at", "6")
    said = launch(parts, "--resume", str(parts / "checkpoints" / "step-6.pt"))
    one, other = (torch.load(w / "checkpoints" / "step-12.pt", weights_only=False) for w in (whole, parts))
    for name in one["model"]:
        assert torch.equal(one["model"][name], other["model"][name]), name
    for mine, theirs in zip(one["optimizers"], other["optimizers"], strict=True):
        for key, entry in mine["state"].items():
            assert all(torch.equal(torch.as_tensor(v), torch.as_tensor(theirs["state"][key][k])) for k, v in entry.items())
    losses = [json.loads(line)["loss"] for line in (whole / "logs/modern/launches/0001/metrics.jsonl").read_text().splitlines()]
    again = [json.loads(line)["loss"] for launch in ("0001", "0002")
             for line in (parts / f"logs/modern/launches/{launch}/metrics.jsonl").read_text().splitlines()]  # fmt: skip
    assert again == losses and len(set(losses)) == 12
    assert "refused" not in said

    broken = torch.load(parts / "checkpoints" / "step-6.pt", weights_only=False)
    for entry in broken["optimizers"][0]["state"].values():
        entry["momentum_buffer"].zero_()
    torch.save(broken, tmp_path / "broken.pt")
    assert "refused before the first step" in launch(parts, "--resume", str(tmp_path / "broken.pt"), code=78)

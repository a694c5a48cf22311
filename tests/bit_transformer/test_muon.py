"""Muon for the matrices of the blocks beside AdamW: every parameter has one optimizer, and a lost one is refused."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bit_transformer.model.transformer import BitTransformer
from bit_transformer.recipes import find_recipe
from bit_transformer.training.setup import build_optimizers
from tests.bit_transformer.launches import ROOT, TINY

# a trainer that saves Muon's momentum and does not load it
FORGETFUL = """
import sys
from torch.optim import Muon
Muon.load_state_dict = lambda self, state: None
from bit_transformer.train import main
sys.exit(main())
"""


def test_each_parameter_has_one_optimizer_and_muon_has_the_matrices_of_the_blocks() -> None:
    recipe = find_recipe("modern")
    model = BitTransformer(recipe.model)
    adamw, muon = build_optimizers(model, recipe.optimizer)
    owned = [id(p) for one in (adamw, muon) for group in one.param_groups for p in group["params"]]
    assert sorted(owned) == sorted(map(id, model.parameters()))
    assert {id(p) for p in muon.param_groups[0]["params"]} == {id(p) for p in model.blocks.parameters() if p.dim() == 2}


def test_order_is_seen_without_a_table_of_positions() -> None:
    """Rotary positions alone: another order of the same bytes is another prediction, and nothing later is seen."""
    torch.manual_seed(0)
    model = BitTransformer(find_recipe("modern").model)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    assert not model.positions.any()
    one, other = (model(torch.tensor([row])).logits_BTV for row in ([1, 2, 3, 4], [2, 1, 3, 4]))
    assert not torch.allclose(one[:, -1], other[:, -1], atol=1e-3)
    later = model(torch.tensor([[1, 2, 9, 9]])).logits_BTV
    assert torch.equal(one[:, :2], later[:, :2])


@pytest.mark.slow
def test_a_lost_muon_state_is_refused_before_the_first_step(tmp_path: Path) -> None:
    settings = [part for one in (*TINY, "total_steps=8", "norm=pre", "muon_lr=0.02") for part in ("--set", one)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("CHRONICLE_")}
    environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def launch(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "chronicle_ml", "run", "--run", "r", "--", sys.executable, *words, *settings]
        return subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=240, check=False)

    first = launch("-m", "bit_transformer.train", "--stop-at", "4")
    assert first.returncode == 0, first.stderr
    refused = launch("-c", FORGETFUL)
    assert refused.returncode == 78 and "refused before the first step" in refused.stdout + refused.stderr
    again = launch("-m", "bit_transformer.train")
    assert again.returncode == 0, again.stdout + again.stderr

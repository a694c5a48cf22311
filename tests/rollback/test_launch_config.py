"""LRs that the next launch takes from its config: edited in the same transaction, by the launch's own command, or refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.optim import lr_scheduler as L

from chronicle.cli.main import run
from chronicle.journal import JournalWriter
from chronicle.paths import RunPaths
from rollback.errors import PlanRefused
from rollback.files.config_text import ConfigFile, NotPlainConfig, numbers, replace_config_numbers
from rollback.lr.launch_config import named_edits
from tests.rollback.disks import picture

RECIPE = """\
# a recipe
model: {_component_: torchtune.models.llama, max_seq_len: 8192}   # flow
optimizer:
  _component_: torch.optim.AdamW
  lr: 3e-4      # peak
lr_scheduler:
- type: LinearLR
  start_factor: 0.1
- {type: Cosine, eta_min: '1e-5'}
notes: |
  lr: 7
text: "lr: 8 # not a comment"
"""


def test_yaml_as_its_parser_reads_it_and_only_the_number_changes() -> None:
    found = {keys: number.value for keys, number in numbers(RECIPE, "yaml").items()}
    assert found == {
        ("model", "max_seq_len"): 8192, ("optimizer", "lr"): 3e-4, ("lr_scheduler", 0, "start_factor"): 0.1,
        ("lr_scheduler", 1, "eta_min"): 1e-5,
    }  # fmt: skip
    after = replace_config_numbers(RECIPE, "yaml", {("optimizer", "lr"): 1e-5, ("lr_scheduler", 1, "eta_min"): 2.5e-6})
    assert after == RECIPE.replace("3e-4 ", "1.0e-05 ").replace("'1e-5'", "'2.5e-06'")
    assert yaml.safe_load(after)["optimizer"]["lr"] == 1e-5  # `1e-05` would be text


@pytest.mark.parametrize(
    ("kind", "text", "after"),
    [
        ("toml", 'a=1\r\n[optimizer]\r\nlr = 3e-4 # x\r\ns = """\nlr = 3e-4\n"""\r\n', ("3e-4 #", "0.5 #")),
        ("toml", '"lr" = 1\n[[o]]\nlr=1\n[[o]]\n[optimizer]\n  name = "A=1"\n  lr=3e-4', ("3e-4", "0.5")),
        ("toml", "optimizer = {name='A', lr = 3e-4, eps=1e-8}\n", ("3e-4", "0.5")),
        ("json", '{"optimizer": {"lr":3e-4 , "b": [1, 2]}}', ("3e-4", "0.5")),
        ("yaml", "---\noptimizer:\n    lr:   3e-4\n    eps: 1e-8\n", ("3e-4", "0.5")),
        ("yaml", "optimizer: {b: [1, 2], 'lr': 3e-4}\r\nz: 1\r\n", ("3e-4", "0.5")),
    ],
)
def test_every_other_byte_stays(kind: str, text: str, after: tuple[str, str]) -> None:
    assert replace_config_numbers(text, kind, {("optimizer", "lr"): 0.5}) == text.replace(*after)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("base: &b\n  lr: 1\noptimizer: *b\n", "line 1 holds an anchor"),
        ("optimizer:\n  <<: *base\n  lr: 1\n", "line 2 holds an anchor"),
        ("lr: 1\nlr: 2\n", "line 2 names `lr` a second time"),
        ("lr: 1\n---\nlr: 2\n", "line 2 begins another document"),
        ("a:\n\tlr: 1\n", "indented with a tab"),
        ("a: [1,\n  2]\n", "line 1 holds a flow collection"),
        ("just text\n", "neither `key: value`"),
    ],
)
def test_what_cannot_be_read_exactly_is_refused_with_its_line(text: str, words: str) -> None:
    with pytest.raises(NotPlainConfig, match=words):
        numbers(text, "yaml")


def test_a_named_field_must_be_a_number_of_a_config() -> None:
    file = ConfigFile("/c/a.yaml", RECIPE, "from --lr-in /c/a.yaml")
    assert named_edits(("/c/a.yaml:optimizer.lr",), (file,), 0.5)[0].after == 1.5e-4
    with pytest.raises(PlanRefused, match=r"expected one of optimizer\.lr"):
        named_edits(("/c/a.yaml:optimizer.rate",), (file,), 0.5)
    with pytest.raises(PlanRefused, match=r"expected FILE:key\.path"):
        named_edits(("/c/train.py:lr",), (), 0.5)


# --- the command, with a launch that takes its LR from the config


def launch(top: Path, *, resumed: bool, steps: int = 8) -> list[float]:
    """As torchtitan does: the LR of the config, a lambda, and a checkpoint whose scheduler is its counter alone."""
    model = torch.nn.Linear(2, 1)
    config = yaml.safe_load((top / "train.yaml").read_text())
    optimizer = torch.optim.AdamW(model.parameters(), lr=float(config["optimizer"]["lr"]))
    scheduler = L.LambdaLR(optimizer, lambda n: 1 / (1 + n))
    path = top / "checkpoints" / "step-5.pt"
    used = []
    if resumed:
        state = torch.load(path, weights_only=False)
        optimizer.load_state_dict(state["optimizer"])
        scheduler.last_epoch = state["lr_scheduler"]["last_epoch"]
        for group, base in zip(optimizer.param_groups, scheduler.base_lrs, strict=True):
            group["lr"] = base * scheduler.lr_lambdas[0](scheduler.last_epoch)
    for n in range(5 if resumed else 0, 5 + steps):
        used.append(optimizer.param_groups[0]["lr"])
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        scheduler.step()
        if n == 4 and not resumed:
            path.parent.mkdir()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 5}
            torch.save(state | {"lr_scheduler": {"last_epoch": scheduler.last_epoch}}, path)
    return used[-steps:]


def recorded(top: Path, argv: list[str]) -> None:
    with JournalWriter(RunPaths(top / "logs" / "r")) as writer:
        writer.append("launch.start", launch=1, data={"argv": argv, "cwd": str(top)})
        writer.append("launch.end", launch=1, data={"exit_code": 0})


def command(top: Path, *words: str) -> int:
    return run([*words, "--run", "r", "--logs", str(top / "logs"), "--checkpoints", str(top / "checkpoints")])


HALF = ("rollback", "--to", "5", "--lr-scale", "0.5", "--yes")


def test_the_config_that_a_person_names_is_edited_with_the_checkpoint_and_undone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.yaml").write_text(RECIPE)
    control = launch(tmp_path, resumed=False)
    before = picture(tmp_path / "checkpoints")
    assert command(tmp_path, *HALF) == 3  # no launch was recorded: its config is not looked for
    assert "multiply the LR of that config by 0.5" in capsys.readouterr().err
    recorded(tmp_path, ["torchrun", "train.py", "--job.config_file", "train.yaml"])
    assert command(tmp_path, *HALF) == 3
    field = f"{tmp_path / 'train.yaml'}:optimizer.lr"
    assert f"`{field}` 0.0003 → 0.00015 (`--lr-in" in capsys.readouterr().err
    assert command(tmp_path, *HALF, "--lr-in", field) == 0
    assert "train.yaml  (config of the next launch)" in capsys.readouterr().out
    assert (tmp_path / "train.yaml").read_text() == RECIPE.replace("3e-4", "0.00015")
    assert launch(tmp_path, resumed=True) == [pytest.approx(lr / 2, rel=1e-9) for lr in control]
    assert command(tmp_path, "undo", "--yes") == 0
    assert (tmp_path / "train.yaml").read_text() == RECIPE and picture(tmp_path / "checkpoints") == before


def test_an_argument_counts_before_the_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.yaml").write_text(RECIPE)
    launch(tmp_path, resumed=False)
    recorded(tmp_path, ["torchrun", "train.py", "--config", "train.yaml", "--optimizer.lr", "3e-4"])
    assert command(tmp_path, *HALF) == 3
    said = capsys.readouterr().err
    assert "`torchrun train.py --config train.yaml --optimizer.lr 0.00015`" in said and "train.yaml:optimizer.lr" not in said
    assert (tmp_path / "train.yaml").read_text() == RECIPE


def unknown(tmp_path: Path, **more: Any) -> None:
    """A script of an unknown writer: an optimizer, and no scheduler."""
    (tmp_path / "checkpoints").mkdir()
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for _ in range(5):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    content: Mapping[str, Any] = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 5}
    torch.save({**content, **more}, tmp_path / "checkpoints" / "step-5.pt")


def test_a_person_names_the_field_and_the_guard_holds_the_lr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unknown(tmp_path)
    (tmp_path / "train.yaml").write_text(RECIPE)
    recorded(tmp_path, ["python", "train.py", "train.yaml"])
    assert command(tmp_path, *HALF) == 3
    place = tmp_path / "train.yaml"
    assert f"`{place}:optimizer.lr` 0.0003 → 0.00015 (`--lr-in FILE:key.path`" in capsys.readouterr().err
    assert command(tmp_path, *HALF, "--lr-in", f"{place}:optimizer.lr") == 0
    assert place.read_text() == RECIPE.replace("3e-4", "0.00015")
    contract = json.loads((tmp_path / "logs" / "r" / "contract.json").read_text())
    assert "was named as the place of the LR" in contract["lr_unproved"][0]
    assert command(tmp_path, "undo", "--yes") == 0 and place.read_text() == RECIPE
    capsys.readouterr()
    assert command(tmp_path, *HALF, "--lr-in", "optimizer.lr") == 2
    assert command(tmp_path, "rollback", "--to", "5", "--lr-in", f"{place}:optimizer.lr", "--dry-run") == 3


# --- a checkpoint that an earlier rollback has edited


def test_an_argument_recorded_before_the_first_rollback_is_multiplied_by_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unknown(tmp_path)
    recorded(tmp_path, ["python", "train.py", "--lr", "3e-4"])
    assert command(tmp_path, *HALF, "--accept-unproved", "given on the command line") == 0
    capsys.readouterr()
    assert command(tmp_path, *HALF) == 3
    assert "`python train.py --lr 7.5e-05`" in capsys.readouterr().err
    recorded(tmp_path, ["python", "train.py", "--lr", "1.5e-4"])
    assert command(tmp_path, *HALF) == 3
    assert "`python train.py --lr 7.5e-05`" in capsys.readouterr().err

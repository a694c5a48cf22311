"""A checkpoint says itself which run, launch and step saved it: in its manifest, in a plain loop's file, in Lightning's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from chronicle.journal import JournalWriter, read_journal
from chronicle.journal.events import EntryKind
from chronicle.paths import RunPaths
from chronicle.story.read import read_story
from rollback.checkpoint.identity import read_identity
from rollback.checkpoint.listing import open_checkpoint
from tests.rollback.command_line import chronicle

CARRIED = {"id": "I1", "run_id": "R1", "run": "tr-190", "launch": 2, "step": 10}
MORE = {"clock": [1.0, 2.0]}


def optimizer_state(**more: Any) -> dict[str, Any]:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(10):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    return {**optimizer.state_dict(), **more}


def saved(path: Path, tree: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(tree, path)
    return path


@pytest.mark.parametrize("place", [("optimizer",), ("state", "optim"), ()])
def test_a_plain_file_tells_it_wherever_its_optimizer_lies(tmp_path: Path, place: tuple[str, ...]) -> None:
    tree: Any = optimizer_state(chronicle={"v": 1, "identity": CARRIED | MORE})
    for name in reversed(place):
        tree = {name: tree}
    assert read_identity(open_checkpoint(saved(tmp_path / "step-10.pt", tree))) == CARRIED


def test_a_lightning_file_tells_it_among_its_callbacks(tmp_path: Path) -> None:
    tree = {
        "state_dict": {},
        "pytorch-lightning_version": "2.6.6",
        "global_step": 10,
        "epoch": 0,
        "loops": {},
        "optimizer_states": [optimizer_state()],
        "lr_schedulers": [],
        "callbacks": {"ModelCheckpoint{'a': 1}": {}, "ChronicleCallback.entered": {"memory": {"v": 1, "identity": CARRIED}}},
    }
    assert read_identity(open_checkpoint(saved(tmp_path / "step=10.ckpt", tree))) == CARRIED


@pytest.mark.parametrize(
    "record",
    [None, 7, "x", {}, {"identity": None}, {"identity": [1]},
     {"identity": {"run_id": 3, "id": "x"}}, {"identity": {"id": "x"}}],
)
def test_what_is_no_identity_is_none(tmp_path: Path, record: Any) -> None:
    """A file may hold anything under that name."""
    path = saved(tmp_path / "step-10.pt", {"optimizer": optimizer_state(chronicle=record)})
    assert read_identity(open_checkpoint(path)) == {}


def test_a_rollback_to_a_file_is_not_inferred(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Step 10 exists in launches 1 and 2: by its number it could be either, the file says launch 1."""
    with JournalWriter(RunPaths(tmp_path / "logs" / "r"), checkpoints=tmp_path / "checkpoints") as journal:
        own = journal.place.run_id
        for launch, start, last in ((1, 0, 12), (2, 0, 20)):
            journal.append("launch.start", launch=launch, data={"start_step": start})
            loaded = {"verdict": "passed", "moment": "before the first step", "basis": "fresh", "run_id": own}
            journal.append("guard.verdict", launch=launch, step=0, data=loaded)
            journal.append("launch.end", launch=launch, data={"last_step": last})
    carried = CARRIED | {"run_id": own, "launch": 1}
    state = {"model": {"w": torch.zeros(2)}, "optimizer": optimizer_state(chronicle={"v": 1, "identity": carried})}
    saved(tmp_path / "checkpoints" / "step-10.pt", state)
    edit = ("--lr-scale", "0.5", "--accept-unproved", "the loop sets none")
    assert chronicle(tmp_path, "rollback", "--to", "10", *edit, "--yes") == 0
    paths = RunPaths(tmp_path / "logs" / "r")
    (receipt,) = read_journal(paths).of_kind(EntryKind.ROLLBACK_RECEIPT)
    assert receipt.data["identity"] == carried
    assert json.loads(paths.contract_path.read_text())["identity"] == "I1"
    lineage = read_story(paths).lineage
    assert [(one.launch, one.first, one.last) for one in lineage.kept] == [(1, 1, 10)]
    assert not lineage.inferred
    capsys.readouterr()
    code = chronicle(tmp_path, "status", "--json")
    assert code == 0 and json.loads(capsys.readouterr().out)["inferred"] is False

"""A step that a script saves as several files side by side: `optim_20.pt` with `model_20.pt` and `sched_20.pt`.

ADM's `opt000100.pt`, `model000100.pt` and `ema_0.9999_000100.pt` are such files, and so is what many small scripts write.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from chronicle.cli.main import run
from rollback.checkpoint.layout import parts_beside, stamp_of
from rollback.checkpoint.listing import list_checkpoints, read_state
from rollback.checks.verify import verify_checkpoint
from rollback.errors import Severity


def save(root: Path, step: int, optimizer: str, weights: tuple[str, ...], scheduler: str | None) -> None:
    model = torch.nn.Linear(4, 1)
    made = torch.optim.AdamW(model.parameters(), lr=4e-4)
    schedule = torch.optim.lr_scheduler.StepLR(made, 1000)
    for _ in range(step):
        model(torch.ones(2, 4)).sum().backward()
        made.step()
        schedule.step()
    root.mkdir(parents=True, exist_ok=True)
    torch.save(made.state_dict(), root / optimizer.format(step))
    for name in weights:
        path = root / name.format(step)
        if name.endswith(".safetensors"):
            save_file(model.state_dict(), path)
        else:
            torch.save(model.state_dict(), path)
    if scheduler:
        torch.save(schedule.state_dict(), root / scheduler.format(step))


@pytest.fixture
def pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for step in (10, 20, 30):
        save(tmp_path / "saved", step, "optim_{}.pt", ("model_{}.pt",), "sched_{}.pt")
    return tmp_path / "saved"


@pytest.fixture
def adm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for step in (10, 20, 30):
        save(tmp_path / "saved", step, "opt{:06d}.pt", ("model{:06d}.pt", "ema_0.9999_{:06d}.pt"), None)
    return tmp_path / "saved"


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


def test_files_of_later_steps_that_were_cut_are_moved_too_and_come_back(
    pairs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A launch that is ended in the middle of a save leaves one; a script that takes the newest file would fail on it."""
    whole = (pairs / "optim_30.pt").read_bytes()
    (pairs / "optim_40.pt").write_bytes(whole[: len(whole) // 2])
    (pairs / "model_40.pt").write_bytes(b"")
    (pairs / "optim_5.pt").write_bytes(b"")
    (pairs / "optim_40.txt").write_text("a note")
    (pairs / "other_40.pt").write_bytes(b"")
    before = {path.name: path.read_bytes() for path in pairs.iterdir()}
    options = ["--checkpoints", "saved", "--run", "small"]
    assert run(["rollback", "--to", "20", "--yes", *options]) == 0
    assert "moved although no whole checkpoint: model_40.pt, optim_40.pt" in capsys.readouterr().out
    stay = {"optim_10.pt", "model_10.pt", "sched_10.pt", "optim_20.pt", "model_20.pt", "sched_20.pt"}
    assert names(pairs) == {*stay, "optim_5.pt", "optim_40.txt", "other_40.pt"}
    assert run(["undo", "--yes", *options]) == 0
    assert {path.name: path.read_bytes() for path in pairs.iterdir()} == before


@pytest.mark.parametrize(
    ("name", "others", "parts"),
    [
        ("optim_20.pt", ["model_20.pt", "sched_20.pt", "model_30.pt", "optim_20.pt.bak"], ("model_20.pt", "sched_20.pt")),
        ("opt000100.pt", ["model000100.pt", "ema_0.9_000100.pt", "opt000200.pt"], ("ema_0.9_000100.pt", "model000100.pt")),
        ("optim_5.bin", ["unet_5.safetensors", "args_5.json", "picture_5.png"], ("args_5.json", "unet_5.safetensors")),
        ("2026-11-21_12-00-00.pt", ["2026-11-22_12-00-00.pt"], ()),
        ("optim_20_rank0.pt", ["optim_20_rank1.pt", "model_20.pt"], ("model_20.pt", "optim_20_rank1.pt")),
        ("optim_5.pt", ["model-00001-of-00005.safetensors", "optim_15.pt"], ()),
        ("optim_step_20.pt", ["model_step_20.pt", "model_step_10.pt"], ("model_step_20.pt",)),
        ("last.pt", ["best.pt", "model_20.pt"], ()),
    ],
)
def test_parts_have_the_number_and_other_letters(name: str, others: list[str], parts: tuple[str, ...]) -> None:
    assert parts_beside(name, others) == parts


def test_all_files_of_a_step_are_read_moved_and_brought_back_together(pairs: Path) -> None:
    before = names(pairs)
    first = list_checkpoints(pairs)[0]
    assert (first.step, first.names) == (10, ("optim_10.pt", "model_10.pt", "sched_10.pt"))
    assert [s.file for s in read_state(pairs / "optim_20.pt").schedulers] == ["sched_20.pt"]
    assert run(["rollback", "--to", "20", "--checkpoints", str(pairs), "--yes"]) == 0
    assert names(pairs) == {name for name in before if "30" not in name}
    assert run(["undo", "--checkpoints", str(pairs), "--yes"]) == 0
    assert names(pairs) == before


def test_an_lr_that_lies_in_two_files_is_edited_in_both_and_undone(pairs: Path) -> None:
    def seen() -> dict[str, tuple[bytes, int, int]]:
        return {one.name: (one.read_bytes(), one.stat().st_mode, one.stat().st_mtime_ns) for one in pairs.iterdir()}

    kept = seen()
    assert run(["rollback", "--to", "20", "--lr-scale", "0.5", "--checkpoints", str(pairs), "--yes"]) == 0
    assert torch.load(pairs / "optim_20.pt")["param_groups"][0]["lr"] == 2e-4
    assert torch.load(pairs / "sched_20.pt")["base_lrs"] == [2e-4]
    assert names(pairs) == {name for name in kept if "30" not in name}
    assert run(["undo", "--checkpoints", str(pairs), "--yes"]) == 0
    assert seen() == kept


@pytest.mark.parametrize("rolling", ["ckpt.pt", "last.pt"])
def test_a_name_without_a_number_gets_the_bytes_of_the_target_and_is_undone(rolling: str, pairs: Path) -> None:
    """A trainer that resumes from `ckpt.pt` finds the target there, not nothing and not the later step."""
    for path in pairs.glob("*_*.pt"):
        if not path.name.startswith("optim"):
            path.unlink()
    kept = (pairs / "optim_30.pt").read_bytes()
    (pairs / rolling).write_bytes(kept)
    assert [c.path.name for c in list_checkpoints(pairs)] == ["optim_10.pt", "optim_20.pt", "optim_30.pt"]
    half = ["--lr-scale", "0.5", "--accept-unproved", "from the file"]
    assert run(["rollback", "--to", "20", *half, "--checkpoints", str(pairs), "--yes"]) == 0
    assert (pairs / rolling).read_bytes() == (pairs / "optim_20.pt").read_bytes()
    assert torch.load(pairs / rolling)["param_groups"][0]["lr"] == 2e-4
    assert run(["undo", "--checkpoints", str(pairs), "--yes"]) == 0
    assert (pairs / rolling).read_bytes() == kept


def test_files_that_each_know_their_step_are_one_checkpoint(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "step": 20}, tmp_path / "model_20.pt")
    save(tmp_path, 20, "optim_{}.pt", (), None)
    assert [(c.step, c.names) for c in list_checkpoints(tmp_path)] == [(20, ("optim_20.pt", "model_20.pt"))]


def test_an_lr_in_one_file_beside_weights_is_edited(adm: Path) -> None:
    order = ["rollback", "--to", "20", "--lr-scale", "0.5", "--checkpoints", str(adm), "--yes"]
    assert run([*order, "--accept-unproved", "the script takes it from the file"]) == 0
    assert torch.load(adm / "opt000020.pt")["param_groups"][0]["lr"] == 2e-4
    assert names(adm) == {f"{part}0000{step}.pt" for part in ("opt", "model", "ema_0.9999_") for step in (10, 20)}


def test_a_damaged_part_spoils_its_step_and_a_changed_one_its_verdict(pairs: Path) -> None:
    stamp = stamp_of(pairs / "optim_20.pt")
    with (pairs / "model_20.pt").open("r+b") as file:
        file.truncate(900)
    findings = {one.step: verify_checkpoint(one, full=True) for one in list_checkpoints(pairs)}
    assert [step for step, found in findings.items() if any(f.severity is Severity.ERROR for f in found)] == [20]
    assert "model_20.pt" in {f.path for f in findings[20]}
    assert stamp_of(pairs / "optim_20.pt") != stamp


def test_one_file_of_an_abandoned_step_is_not_brought_back_alone(pairs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["rollback", "--to", "10", "--checkpoints", str(pairs), "--yes"]) == 0
    aside = next(pairs.parent.glob("abandoned/*/optim_30.pt"))
    assert run(["rollback", "--to", str(aside), "--checkpoints", str(pairs), "--yes"]) != 0
    assert "model_30.pt, sched_30.pt beside it" in capsys.readouterr().err


def test_two_optimizers_of_one_step_side_by_side_are_edited_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for step in (20, 30):
        save(tmp_path / "saved", step, "G_{}.pth", (), None)
        save(tmp_path / "saved", step, "D_{}.pth", (), None)
    order = ["rollback", "--to", "saved/G_20.pth", "--checkpoints", "saved", "--dry-run"]
    assert run([*order, "--lr-scale", "0.5", "--accept-unproved", "the script takes it from the file"]) == 0
    out = capsys.readouterr().out
    assert "edit        D_20.pth" in out and "edit        G_20.pth" in out and "D_30.pth  G_30.pth" in out


@pytest.fixture
def kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One directory a kind: `model/20.pt` with `optim/20.pt`, as BasicSR's `models/` with `training_states/`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "saved/model").mkdir(parents=True)
    for step in (10, 20, 30):
        save(tmp_path / "saved/optim", step, "{}.pt", ("../model/{}.pt",), None)
    return tmp_path / "saved"


def test_weights_of_later_steps_in_another_directory_are_named(kinds: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["rollback", "--to", "10", "--checkpoints", str(kinds / "optim"), "--yes"]) == 0
    out = capsys.readouterr().out
    assert "not moved: `../model` holds files of the later steps too (20.pt to 30.pt)" in out
    assert "done: step 10 is ready for the next launch" in out
    assert names(kinds / "model") == {"10.pt", "20.pt", "30.pt"}


def test_another_run_in_the_directory_beside_is_not_named(pairs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (10, 20, 30):
        save(pairs.parent / "other", step, "optim_{}.pt", (), None)
    assert run(["rollback", "--to", "10", "--checkpoints", str(pairs), "--dry-run"]) == 0
    assert "../other" not in capsys.readouterr().out


def test_where_there_are_none_the_directory_that_has_some_is_named(kinds: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["rollback", "--to", "10", "--checkpoints", str(kinds), "--yes"]) != 0
    assert f"3 checkpoints are in `{kinds / 'optim'}`" in capsys.readouterr().err
    run(["verify", "--checkpoints", str(kinds / "model")])
    assert f"3 are in {kinds / 'optim'}" in capsys.readouterr().out

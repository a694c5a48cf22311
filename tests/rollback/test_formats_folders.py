"""Directories of several torch files: litgpt, OLMo-core, SpeechBrain, torchtune, a script's. Read, moved, edited, undone.

The layouts are those that the frameworks' own classes wrote for `python -m benchmarks.authorities configs`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from torch.distributed.checkpoint import save as save_dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from chronicle.cli.main import run
from chronicle.journal import JournalWriter
from chronicle.paths import RunPaths
from rollback.checkpoint.listing import list_checkpoints, open_checkpoint, read_state
from rollback.checks.verify import verify_checkpoint
from rollback.errors import Severity

LR = 4e-4


def trained(**more: float) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    for group in optimizer.param_groups:
        group.update(more)
    for _ in range(20):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    return model, optimizer


def litgpt(root: Path, step: int = 20) -> Path:
    path = root / f"step-{step:08d}"
    path.mkdir(parents=True)
    model, optimizer = trained()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": 4 * step, "step_count": step}
    torch.save(state, path / "lit_model.pth")
    (path / "hyperparameters.yaml").write_text(CONFIGS["litgpt"])
    (path / "model_config.yaml").write_text("n_embd: 4\n")
    return path


def olmo(root: Path, step: int = 20) -> Path:
    path = root / f"step{step}"
    (path / "train").mkdir(parents=True)
    model, optimizer = trained(initial_lr=LR)
    flat = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    save_dcp({"model": model.state_dict(), "optim": flat}, checkpoint_id=path / "model_and_optim", no_dist=True)
    torch.save({"global_step": step, "epoch": 1, "max_steps": 100}, path / "train" / "rank0.pt")
    (path / ".metadata.json").write_text('{"version": "2.0"}')
    return path


def speechbrain(root: Path, step: int = 20, scheduler: dict[str, object] | None = None) -> Path:
    path = root / f"CKPT+step_{step}"
    path.mkdir(parents=True)
    model, optimizer = trained(prev_lr=5e-4)
    torch.save(model.state_dict(), path / "model.ckpt")
    torch.save(optimizer.state_dict(), path / "optimizer.ckpt")
    bob = {"hyperparam_value": LR, "metric_values": [1.0, 0.9], "current_patient": 0}
    torch.save(scheduler or bob, path / "scheduler_model.ckpt")
    (path / "counter.ckpt").write_text("3")
    (path / "brain.ckpt").write_text(f"avg_train_loss: 0.5\noptimizer_step: {step}\nstep: {4 * step}\n")
    (path / "CKPT.yaml").write_text("end-of-epoch: true\nunixtime: 1.0\n")
    return path


def torchtune(root: Path, step: int = 20) -> Path:
    path = root / "out"
    (path / "recipe_state").mkdir(parents=True)
    (path / "epoch_0").mkdir()
    model, optimizer = trained(initial_lr=LR)
    torch.save(model.state_dict(), path / "epoch_0" / "model-00001-of-00001.bin")
    state = {"optimizer": optimizer.state_dict(), "epochs_run": 1, "total_epochs": 3, "max_steps_per_epoch": step}
    torch.save(state, path / "recipe_state" / "recipe_state.pt")
    return path


CONFIGS = {
    "litgpt": "optimizer:\n  class_path: torch.optim.AdamW\n  init_args:\n    lr: 4e-4   # peak\n"
    "train:\n  min_lr: 4e-5\n  lr_warmup_steps: 5\n",
    "olmo": "train_module:\n  optim:\n    lr: 4e-4\n",
    "speechbrain": "lr: 4e-4\n",
    "torchtune": "optimizer:\n  lr: 4e-4\n",
}
AFTER = {
    "litgpt": {"optimizer.init_args.lr": 2e-4, "train.min_lr": 2e-5},
    "olmo": {"train_module.optim.lr": 2e-4},
    "speechbrain": {"lr": 4e-4},  # NewBob's value and the optimizer's LR are in the checkpoint
    "torchtune": {"optimizer.lr": 4e-4},  # a schedule is made from the loaded `initial_lr`
}
MAKERS = [litgpt, olmo, speechbrain, torchtune]
Maker = Callable[[Path], Path]


def tell(root: Path, name: str, words: str = "train.py --config c.yaml") -> list[str]:
    """Record the launch that ended, with its config; returns the options that name the run."""
    (root.parent / "c.yaml").write_text(CONFIGS[name])
    with JournalWriter(RunPaths(root.parent / "logs" / "r")) as writer:
        writer.append("launch.start", launch=1, data={"argv": ["python", *words.split()], "cwd": str(root.parent)})
        writer.append("launch.end", launch=1, data={"exit_code": 0})
    return ["--run", "r", "--logs", str(root.parent / "logs"), "--checkpoints", str(root)]


def at(path: Path, dotted: str) -> float:
    found = yaml.safe_load(path.read_text())
    for key in dotted.split("."):
        found = found[key]
    return float(found)


def errors(path: Path) -> list[str]:
    found = verify_checkpoint(open_checkpoint(path, count_steps=False), full=True)
    return [f.message for f in found if f.severity is Severity.ERROR]


def tree(top: Path) -> dict[str, str]:
    """Digests of all files below."""
    return {str(p.relative_to(top)): hashlib.sha256(p.read_bytes()).hexdigest() for p in top.rglob("*") if p.is_file()}


@pytest.mark.parametrize("make", MAKERS, ids=lambda m: m.__name__)
def test_each_is_named_and_sound(make: Maker, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make(tmp_path / "checkpoints")
    assert run(["inspect", str(path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["format"].replace("-core", "") == make.__name__ and shown["step"] == 20
    assert errors(path) == []
    assert [c.step for c in list_checkpoints(path.parent)] == [20]


@pytest.mark.parametrize("make", MAKERS, ids=lambda m: m.__name__)
def test_half_the_lr_and_undo(make: Maker, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every LR of the checkpoint is halved, and the fields of the config that are named; `undo` gives the bytes back."""
    root = tmp_path / "checkpoints"
    path = make(root)
    places = tell(root, make.__name__)
    fields = AFTER[make.__name__] if make in (litgpt, olmo) else ()
    named = [word for key in fields for word in ("--lr-in", f"{tmp_path / 'c.yaml'}:{key}")]
    before, config = tree(root), (tmp_path / "c.yaml").read_bytes()
    old = read_state(open_checkpoint(path)).optimizers[0].groups[0]
    assert run(["rollback", "--to", "20", "--lr-scale", "0.5", "--yes", *places, *named]) == 0, capsys.readouterr().err
    state = read_state(open_checkpoint(path))
    new = state.optimizers[0].groups[0]
    assert new["lr"] == pytest.approx(LR / 2) and new.get("initial_lr") in (None, pytest.approx(LR / 2))
    assert new.get("prev_lr") == old.get("prev_lr")
    assert all(s.state["hyperparam_value"] == pytest.approx(LR / 2) for s in state.schedulers)
    assert {key: at(tmp_path / "c.yaml", key) for key in AFTER[make.__name__]} == pytest.approx(AFTER[make.__name__])
    assert run(["undo", "--yes", *places]) == 0
    assert tree(root) == before and (tmp_path / "c.yaml").read_bytes() == config


@pytest.mark.parametrize(
    ("make", "words", "line"),
    [
        (litgpt, "train.py", "saved with `optimizer.init_args.lr` 0.0004, `train.min_lr` 4e-05"),
        (litgpt, "train.py --optimizer.init_args.lr=4e-4", "init_args.lr=4e-4` → `--optimizer.init_args.lr=0.0002`"),
        (olmo, "train.py", "multiply it by 0.5 where your script sets it"),
        (olmo, "train.py --train_module.optim.lr=4e-4", "`--train_module.optim.lr=4e-4` → `--train_module.optim.lr=0.0002`"),
    ],
)
def test_without_a_config_the_argument_is_named(
    make: Maker, words: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "checkpoints"
    make(root)
    before = tree(root)
    assert run(["rollback", "--to", "20", "--lr-scale", "0.5", "--yes", *tell(root, make.__name__, words)]) == 3
    assert line in capsys.readouterr().err.replace("\n", " ") and tree(root) == before


def test_counters_of_speechbrain_prove_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """NoamScheduler saves `losses` and `n_steps`; its LR comes from the script's hyper-parameters."""
    root = tmp_path / "checkpoints"
    speechbrain(root, scheduler={"losses": [], "n_steps": 20})
    assert run(["rollback", "--to", "20", "--lr-scale", "0.5", "--yes", *tell(root, "speechbrain")]) == 3
    said = capsys.readouterr().err
    assert "no known scheduler class" in said and "c.yaml:lr` 0.0004 → 0.0002" in said
    assert not [message for message in errors(root / "CKPT+step_20") if "restarts" in message]


def test_several_optimizers_of_torchtune_are_not_proved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`optimizer_in_bwd` keeps an optimizer for each parameter, and one schedule for all."""
    root = tmp_path / "checkpoints"
    path = torchtune(root) / "recipe_state" / "recipe_state.pt"
    held = torch.load(path)
    held["optimizer"] = {"weight": trained()[1].state_dict(), "bias": trained()[1].state_dict()}
    torch.save(held, path)
    assert run(["rollback", "--to", "20", "--lr-scale", "0.5", "--yes", *tell(root, "torchtune")]) == 3
    assert "not proved" in capsys.readouterr().err


def test_a_checkpoint_named_as_the_directory_of_checkpoints_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was exchanged half: exit 4, and `recover` had to bring it back."""
    path = torchtune(tmp_path / "checkpoints")
    places = [*tell(path.parent, "torchtune")[:-1], str(path)]
    before = tree(tmp_path)
    assert run(["rollback", "--to", "20", "--lr-scale", "0.5", "--yes", *places]) == 3
    assert "is a checkpoint itself: a rollback exchanges checkpoints inside a directory" in capsys.readouterr().err
    assert {k: v for k, v in tree(tmp_path).items() if k in before} == before


@pytest.mark.parametrize(
    ("make", "name", "words"),
    [
        (litgpt, "lit_model.pth", ""),
        (olmo, ".metadata.json", "it is written last"),
        (olmo, "model_and_optim/.metadata", "it is written last"),
        (olmo, "train/rank0.pt", "no counters of the trainer"),
        (speechbrain, "optimizer.ckpt", ""),
    ],
)
def test_a_cut_save_is_no_sound_checkpoint(make: Maker, name: str, words: str, tmp_path: Path) -> None:
    path = make(tmp_path)
    target = path / name
    if words:
        target.unlink()
    else:
        target.write_bytes(target.read_bytes()[: target.stat().st_size // 2])
    found = errors(path)
    assert found and any(words in message for message in found), found


@pytest.mark.parametrize(
    "state",
    [
        {"base_values": [1e-3], "param_group_field": "lr", "t_in_epochs": True, "noise_range_t": None},  # timm
        {"min_lr": 0.0, "max_lr": 1e-3, "lr_decay_style": "cosine", "lr_decay_steps": 90, "num_steps": 20},  # Megatron
        {"hyperparam_value": LR, "metric_values": [1.0], "current_patient": 0},  # SpeechBrain
    ],
)
def test_a_scheduler_that_counts_in_its_own_way_does_not_restart(state: dict[str, object], tmp_path: Path) -> None:
    """`verify` said of each of them that it restarts at 0, and exited 5."""
    torch.save({"optimizer": trained()[1].state_dict(), "scheduler": state, "step": 20}, tmp_path / "ckpt_20.pt")
    found = verify_checkpoint(open_checkpoint(tmp_path / "ckpt_20.pt"), full=True)
    assert [f.message for f in found if f.severity is not Severity.INFO] == []


def test_later_ones_are_set_aside(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    litgpt(root)
    litgpt(root, 40)
    assert run(["rollback", "--to", "20", "--yes", *tell(root, "litgpt")]) == 0
    assert [p.name for p in root.iterdir() if not p.name.startswith(".")] == ["step-00000020"]


# --- Directories of a script


def script(path: Path, step: int, files: str = "one") -> Path:
    """A directory as scripts write it; `files`: "one" file, "parts" of their own, "ranks", "weights" alone, "own" names."""
    path.mkdir(parents=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    for _ in range(step):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        schedule.step()
    parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": schedule.state_dict()}
    if files == "one":
        torch.save({**parts, "step": step}, path / "state.pt")
    if files in ("parts", "weights"):
        torch.save(parts["model"], path / "model.pt")
    if files == "parts":
        torch.save(parts["optimizer"], path / "optimizer.pt")
        torch.save(parts["scheduler"], path / "scheduler.pt")
        (path / "meta.json").write_text(json.dumps({"step": step}))
    if files == "own":
        torch.save({"opt": parts["optimizer"], "sched": parts["scheduler"]}, path / "training_state.bin")
    if files == "nested":
        (path / "states").mkdir()
        torch.save({"opt": parts["optimizer"], "sched": parts["scheduler"], "step": step}, path / "states" / "training.chkpt")
        torch.save(parts["model"], path / "weights.pyth")
    if files == "ranks":
        for rank in range(2):
            torch.save({**parts, "step": step}, path / f"state_rank{rank}.pth")
        torch.save(parts["model"], path / "weights.tar")
    return path


@pytest.mark.parametrize("files", ["one", "parts", "own", "nested", "ranks"])
@pytest.mark.parametrize("name", ["step-{}", "checkpoint-{}", "iter_{:07d}", "run_a_ckpt{}", "{}"])
def test_a_scripts_directory_is_a_checkpoint_of_the_step_that_it_counts(files: str, name: str, tmp_path: Path) -> None:
    for step in (10, 20):
        script(tmp_path / name.format(step), step, files)
    found = list_checkpoints(tmp_path)
    assert [(c.step, c.format, c.step_source) for c in found] == [(n, "folder", "counters") for n in (10, 20)]
    assert errors(found[0].path) == []


def test_the_step_of_a_scripts_directory_is_not_its_number(tmp_path: Path) -> None:
    script(tmp_path / "epoch3", 30)
    assert [c.step for c in list_checkpoints(tmp_path)] == [30]


@pytest.mark.parametrize("name", ["run-30", "global-20", "save_20", "model-20", "run20", "last", "a trial"])
def test_a_directory_of_torch_files_is_a_checkpoint_whatever_it_is_called(name: str, tmp_path: Path) -> None:
    script(tmp_path / name, 30)
    assert [(c.path.name, c.step, c.step_source) for c in list_checkpoints(tmp_path)] == [(name, 30, "counters")]


@pytest.mark.parametrize(
    ("name", "files", "more"),
    [
        ("3", "one", None),  # of the third run, overwritten: it counts 30
        ("step-30", "weights", None),  # nothing in it counts
        ("step-30", "one", "latest.pt"),  # a run's folder of files
        ("step-30", "one", "saved/latest.pt"),
        ("run_step-30", "one", "step_10/state.pt"),  # a run's folder of steps
        ("30", "one", "model_20.pth"),
    ],
)
def test_what_a_script_left_is_not_guessed_to_be_a_checkpoint(name: str, files: str, more: str | None, tmp_path: Path) -> None:
    path = script(tmp_path / name, 30, files)
    if more:
        (path / more).parent.mkdir(exist_ok=True)
        torch.save({}, path / more)
    assert list_checkpoints(tmp_path) == []


def test_a_runs_folder_with_a_number_lists_its_files(tmp_path: Path) -> None:
    root = tmp_path / "7"
    state = script(tmp_path / "x", 30) / "state.pt"
    root.mkdir()
    for name in ("model_30.pth", "checkpoint.pth"):
        (root / name).write_bytes(state.read_bytes())
    assert sorted(c.path.name for c in list_checkpoints(root)) == ["model_30.pth"]  # the other is its copy


@pytest.mark.parametrize("files", ["one", "parts", "own", "nested"])
def test_a_scripts_directory_is_edited_later_ones_set_aside_and_both_undone(files: str, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    for step in (10, 20):
        script(root / f"step-{step}", step, files)
    places = ["--run", "r", "--logs", str(tmp_path / "logs"), "--checkpoints", str(root)]
    before, old = tree(root), read_state(open_checkpoint(root / "step-10"))
    assert run(["rollback", "--to", "10", "--lr-scale", "0.5", "--yes", *places]) == 0
    new = read_state(open_checkpoint(root / "step-10"))
    assert new.optimizers[0].groups[0]["lr"] == pytest.approx(old.optimizers[0].groups[0]["lr"] / 2)
    assert new.schedulers[0].state["base_lrs"] == [pytest.approx(LR / 2)]
    assert not (root / "step-20").exists()
    assert run(["undo", "--yes", *places]) == 0
    assert tree(root) == before


@pytest.mark.parametrize("ending", ["pyth", "th", "chkpt", "mdl", "model", "state"])
def test_a_scripts_file_has_one_of_many_endings(ending: str, tmp_path: Path) -> None:
    (script(tmp_path / "x", 30) / "state.pt").replace(tmp_path / f"checkpoint_epoch_00003.{ending}")
    (tmp_path / f"tokenizer.{ending}").write_bytes(b"\n\x0e\n\x05<unk>")
    assert [(c.step, c.path.suffix) for c in list_checkpoints(tmp_path)] == [(30, f".{ending}")]


def test_a_stray_in_a_scripts_directory_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = script(tmp_path / "checkpoints" / "step-20", 20, "parts")
    (path / "optimizer.pt.orig").write_bytes(b"x")
    before = tree(tmp_path)
    assert run(["rollback", "--to", "20", "--yes", "--logs", str(tmp_path / "logs"), "--checkpoints", str(path.parent)]) != 0
    said = capsys.readouterr().err
    assert "`step-20/optimizer.pt.orig`" in said and "verify --quarantine" in said
    assert {k: v for k, v in tree(tmp_path).items() if k in before} == before

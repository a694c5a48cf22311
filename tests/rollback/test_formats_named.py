"""Formats that are read and named, whose LR is not edited: by their layout, and by the framework's own save where installed."""

from __future__ import annotations

import io
import json
import struct
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from chronicle.cli.main import run
from rollback.checkpoint.listing import list_checkpoints, open_checkpoint, read_state
from rollback.checks.verify import verify_checkpoint
from rollback.errors import Severity


def errors(path: Path) -> list[str]:
    found = verify_checkpoint(open_checkpoint(path, count_steps=False), full=True)
    return [f"{f.check} {f.message}" for f in found if f.severity is Severity.ERROR]


def tensors(path: Path, *names: str) -> None:
    header = {name: {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]} for i, name in enumerate(names)}
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(4 * len(names)))


def keras(top: Path) -> Path:
    path = top / "model_03.keras"
    schedule = {"class_name": "CosineDecay", "config": {"initial_learning_rate": 1e-3, "decay_steps": 100}}
    optimizer = {"class_name": "AdamW", "config": {"learning_rate": schedule}}
    config = {"class_name": "Sequential", "compile_config": {"optimizer": optimizer}}
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("metadata.json", json.dumps({"keras_version": "3.15.1", "date_saved": "2026-11-22@21:38:13"}))
        archive.writestr("config.json", json.dumps(config))
        archive.writestr("model.weights.h5", b"\x89HDF" + bytes(range(200)))
    return path


def orbax(top: Path) -> Path:
    path = top / "20"
    (path / "default" / "d").mkdir(parents=True)
    (path / "_CHECKPOINT_METADATA").write_text(json.dumps({"item_handlers": {}, "commit_timestamp_nsecs": 1795383539926296894}))
    (path / "default" / "_METADATA").write_text(json.dumps({"tree_metadata": {"('w',)": {}, "('b',)": {}}}))
    (path / "default" / "manifest.ocdbt").write_bytes(b"\x0c\xdb\x3d\xa2x")
    (path / "default" / "d" / "2e6a7afac567cc0a").write_bytes(b"data")
    return path


def peft(top: Path) -> Path:
    path = top / "adapter"
    path.mkdir()
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"]}))
    tensors(path / "adapter_model.safetensors", "base.q_proj.lora_A.weight", "base.q_proj.lora_B.weight")
    return path


def nemo(top: Path) -> Path:
    path = top / "model.nemo"
    with tarfile.open(path, "w") as archive:
        for name, content in (("./model_config.yaml", b"optim:\n  lr: 0.1\n"), ("./model_weights.ckpt", bytes(5000))):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def nemo2(top: Path) -> Path:
    path = top / "model--val_loss=1.2-step=400"
    (path / "weights").mkdir(parents=True)
    (path / "context").mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"module.w": torch.ones(4)}, checkpoint_id=str(path / "weights"), no_dist=True)
    (path / "context" / "model.yaml").write_text("optim: {}\n")
    return path


def trained() -> torch.optim.Optimizer:
    layer = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=2e-5)
    layer(torch.ones(1, 2)).sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return optimizer


def torchtune(top: Path) -> Path:
    path = top / "out"
    (path / "recipe_state").mkdir(parents=True)
    (path / "epoch_0").mkdir()
    tensors(path / "epoch_0" / "model-00001-of-00001.safetensors", "w")
    state = {"optimizer": trained().state_dict(), "epochs_run": 1, "seed": 7, "total_epochs": 3, "max_steps_per_epoch": 100}
    torch.save(state, path / "recipe_state" / "recipe_state.pt")
    return path


def safetensors(top: Path) -> Path:
    path = top / "optimizer.safetensors"
    tensors(path, "state.0.exp_avg", "state.0.exp_avg_sq")
    return path


MADE = [keras, orbax, peft, nemo, nemo2, safetensors]


@pytest.mark.parametrize(
    ("make", "name", "shown"),
    [
        (keras, "keras", ("model.weights.h5", "its LR is not edited")),
        (orbax, "orbax", ("step 20", "OCDBT")),
        (peft, "peft adapter", ("weights alone",)),
        (nemo, "nemo", ("an archive of weights and config",)),
        (nemo2, "nemo 2", ("step 400", "weights and context")),
        (torchtune, "torchtune", ("2e-05", "epochs_run", "recipe_state/recipe_state.pt")),
        (safetensors, "safetensors", ("tensors alone",)),
    ],
)
def test_each_is_named_read_and_sound(
    make: Callable[[Path], Path], name: str, shown: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make(tmp_path)
    assert run(["inspect", str(path)]) == 0
    said = capsys.readouterr().out
    assert f"  {name} · " in said.splitlines()[0]
    assert [word for word in shown if word not in said] == []
    assert errors(path) == []


@pytest.mark.parametrize("make", MADE)
def test_a_rollback_to_it_is_refused_by_name(
    make: Callable[[Path], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "checkpoints").mkdir()
    path = make(tmp_path / "checkpoints")
    listed = [c for c in list_checkpoints(path.parent) if c.step is not None]
    if not listed:
        return  # it has no step that one could go back to
    words = ["rollback", "--to", str(listed[-1].step), "--lr-scale", "0.5", "--yes", "--run", "r"]
    assert run([*words, "--logs", str(tmp_path / "logs"), "--checkpoints", str(path.parent)]) == 3
    assert "read and checked, a rollback does not move or edit them" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("make", "harm", "words"),
    [
        (keras, "flip", "has CRC"),
        (keras, "cut", ""),
        (orbax, "default/manifest.ocdbt", "`default/manifest.ocdbt` is missing"),
        (peft, "adapter_model.safetensors cut", "truncated"),
        (nemo2, "weights/.metadata", "weights/.metadata"),
        (torchtune, "recipe_state/recipe_state.pt cut", ""),
        (safetensors, "cut", "truncated"),
    ],
)
def test_damage_is_found(make: Callable[[Path], Path], harm: str, words: str, tmp_path: Path) -> None:
    path = make(tmp_path)
    name, _, cut = harm.rpartition(" ")
    target = path if harm in ("cut", "flip") else path / (name or harm)
    raw = target.read_bytes()
    if harm == "flip":
        at = raw.index(bytes(range(100, 120)))
        target.write_bytes(raw[:at] + b"\xff" + raw[at + 1 :])
    elif cut == "cut":
        target.write_bytes(raw[: len(raw) * 2 // 3])
    else:
        target.unlink()
    found = errors(path)
    assert found and any(words in one for one in found), found


def test_what_is_not_read_is_said_and_not_called_absent(tmp_path: Path) -> None:
    for make in (keras, orbax, nemo, nemo2):
        found = verify_checkpoint(open_checkpoint(make(tmp_path), count_steps=False))
        said = next(f.message for f in found if f.check == "F6")
        assert said.endswith("not read: nothing is known of the optimizer's state")


def test_a_save_of_orbax_in_progress_has_no_step(tmp_path: Path) -> None:
    path = orbax(tmp_path)
    path.rename(tmp_path / "20.orbax-checkpoint-tmp-1795383539")
    assert [c.step for c in list_checkpoints(tmp_path)] in ([], [None])


LAMBDA = {"base_lrs": [0.1], "last_epoch": 5, "_step_count": 6, "_last_lr": [0.1], "lr_lambdas": [None]}
RANDOM = {"step": 3, "random_state": (3, (1, 2), None), "torch_manual_seed": torch.ones(8, dtype=torch.uint8)}


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("scheduler.pt", LAMBDA, "LambdaLR"),
        ("optimizer.pt", None, "2e-05"),
        ("random_states_3.pkl", RANDOM, "rng         rank 3"),
    ],
)  # fmt: skip
def test_a_single_state_file_is_what_it_is(
    name: str, content: object, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(trained().state_dict() if content is None else content, tmp_path / name)
    assert run(["inspect", str(tmp_path / name)]) == 0
    assert words in capsys.readouterr().out


# --- by the framework's own save


@pytest.mark.slow
def test_keras_own_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    module = pytest.importorskip("keras")
    model = module.Sequential([module.layers.Input((4,)), module.layers.Dense(2)])
    model.compile(optimizer=module.optimizers.AdamW(learning_rate=1e-3), loss="mse")
    model.save(tmp_path / "m.keras")
    assert open_checkpoint(tmp_path / "m.keras").format == "keras" and errors(tmp_path / "m.keras") == []


@pytest.mark.slow
def test_orbax_own_save(tmp_path: Path) -> None:
    module = pytest.importorskip("orbax.checkpoint")
    with module.CheckpointManager(tmp_path / "c") as manager:
        manager.save(20, args=module.args.StandardSave({"w": torch.ones(4).numpy(), "step": 20}))
        manager.wait_until_finished()
    (found,) = list_checkpoints(tmp_path / "c")
    assert (found.format, found.step, errors(found.path)) == ("orbax", 20, [])


@pytest.mark.slow
def test_peft_own_save(tmp_path: Path) -> None:
    module = pytest.importorskip("peft")
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}
    model = module.get_peft_model(LlamaForCausalLM(LlamaConfig(**sizes)), module.LoraConfig(r=2, target_modules=["q_proj"]))
    model.save_pretrained(tmp_path / "a")
    assert open_checkpoint(tmp_path / "a").format == "peft adapter" and errors(tmp_path / "a") == []


@pytest.mark.slow
def test_bitsandbytes_own_optimizer(tmp_path: Path) -> None:
    module = pytest.importorskip("bitsandbytes")
    layer = torch.nn.Linear(128, 128)
    optimizer = module.optim.AdamW8bit(layer.parameters(), lr=1e-3, min_8bit_size=1)
    layer(torch.ones(1, 128)).sum().backward()
    optimizer.step()
    torch.save({"optimizer": optimizer.state_dict(), "step": 1}, tmp_path / "b.pt")
    state = read_state(tmp_path / "b.pt")
    assert "quantised by bitsandbytes" in state.notes[0] and errors(tmp_path / "b.pt") == []

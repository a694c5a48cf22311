"""What a complete checkpoint is, its own save has shown: scripts with save hooks resume, and a lost file is seen."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from chronicle import ResumeRefused
from chronicle.cli.verify import verify_checkpoints
from rollback.api import verify
from rollback.checkpoint.listing import open_checkpoint
from rollback.checkpoint.manifest import MANIFEST_NAME
from rollback.errors import Finding, Severity
from tests.guard.training import Launch, start

Hooks = Callable[[Any], None]


def pops_weights(name: str) -> Hooks:
    """The pattern of diffusers and of PEFT scripts: the hook saves by itself and takes the weights off Accelerate's list."""

    def register(accelerator: Any) -> None:
        def save(models: list[Any], weights: list[Any], output_dir: str) -> None:
            for model in models:
                file = Path(output_dir) / name
                file.parent.mkdir(parents=True, exist_ok=True)
                save_file(accelerator.unwrap_model(model).state_dict(), file)
                (file.parent / "config.json").write_text("{}")
                weights.pop()

        def load(models: list[Any], input_dir: str) -> None:
            while models:
                models.pop().load_state_dict(load_file(Path(input_dir) / name))

        accelerator.register_save_state_pre_hook(save)
        accelerator.register_load_state_pre_hook(load)

    return register


def also_saves(name: str) -> Hooks:
    """A hook that adds a file whose name looks like a state file, or like one of torch."""

    def register(accelerator: Any) -> None:
        def save(models: list[Any], weights: list[Any], output_dir: str) -> None:
            (Path(output_dir) / name).parent.mkdir(parents=True, exist_ok=True)
            (Path(output_dir) / name).write_bytes(b"{}")

        accelerator.register_save_state_pre_hook(save)

    return register


STRANGERS: dict[str, Hooks] = {
    "diffusers": pops_weights("unet/diffusion_pytorch_model.safetensors"),
    "lora": pops_weights("pytorch_lora_weights.safetensors"),
    "peft": pops_weights("adapter_model.safetensors"),
    "own name": pops_weights("weights/net.safetensors"),
    "scheduler_config.json": also_saves("scheduler_config.json"),
    "vocab.bin": also_saves("tokenizer/vocab.bin"),
    "backup": also_saves("backup/notes.txt"),
}


def launch_with(hooks: Hooks, run_dir: Path, seed: int = 0) -> Launch:
    launch = start(run_dir, seed=seed)
    hooks(launch.accelerator)
    return launch


def errors(checkpoint: Path) -> list[Finding]:
    return [finding for finding in verify(checkpoint, full=True) if finding.severity is Severity.ERROR]


@pytest.mark.parametrize("hooks", STRANGERS.values(), ids=STRANGERS.keys())
def test_checkpoint_of_a_save_hook_is_whole_and_resumes(hooks: Hooks, run_dir: Path, checkpoint: Path) -> None:
    launch = launch_with(hooks, run_dir)
    launch.train(3)
    launch.save(checkpoint)
    expected = launch.train(3)
    assert errors(checkpoint) == []
    again = launch_with(hooks, run_dir, seed=1)
    again.accelerator.load_state(str(checkpoint))
    assert again.train(3) == expected


def test_file_that_a_hook_wrote_and_that_is_gone_is_refused(run_dir: Path, checkpoint: Path) -> None:
    hooks = STRANGERS["diffusers"]
    launch = launch_with(hooks, run_dir)
    launch.train(3)
    launch.save(checkpoint)
    (checkpoint / "unet" / "diffusion_pytorch_model.safetensors").unlink()
    assert [finding.check for finding in errors(checkpoint)] == ["F1"]
    with pytest.raises(ResumeRefused, match="before load"):
        launch_with(hooks, run_dir, seed=1).accelerator.load_state(str(checkpoint))


def test_leftover_of_a_state_file_stays_a_stray_even_if_the_manifest_lists_it(run_dir: Path, checkpoint: Path) -> None:
    """Seed exp9: a loader that counts `custom_checkpoint*` skipped all custom state because of an `.orig`."""
    launch = start(run_dir)
    checkpoint.mkdir(parents=True)
    (checkpoint / "custom_checkpoint_0.pkl.orig").write_bytes(b"x")
    launch.train(3)
    launch.save(checkpoint)
    assert open_checkpoint(checkpoint).strays == ("custom_checkpoint_0.pkl.orig",)


def test_without_a_manifest_the_usual_layout_says_what_is_missing_at_all(run_dir: Path, checkpoint: Path) -> None:
    launch = start(run_dir)
    launch.train(3)
    launch.save(checkpoint)
    hooked = checkpoint.with_name("opt_step-6")
    shutil.copytree(checkpoint, hooked)
    for folder in (checkpoint, hooked):
        (folder / MANIFEST_NAME).unlink()
        (folder / "model.safetensors").unlink()
    (hooked / "unet").mkdir()
    save_file({"w": torch.zeros(2)}, hooked / "unet" / "diffusion_pytorch_model.safetensors")
    assert [finding.path for finding in errors(checkpoint)] == ["model.safetensors"]
    assert errors(hooked) == []
    said = [f.message for f in verify(hooked) if f.check == "F2"]
    assert len(said) == 1 and "unet/diffusion_pytorch_model.safetensors` may hold it" in said[0]


def test_manifest_made_by_hand_is_no_witness_of_a_save(run_dir: Path, checkpoint: Path) -> None:
    launch = start(run_dir)
    launch.train(3)
    launch.save(checkpoint)
    (checkpoint / "model.safetensors").unlink()
    verify_checkpoints(str(checkpoint), write=True)
    assert "F2" in [finding.check for finding in errors(checkpoint)]


def test_manifest_of_a_newer_version_is_unknown_and_no_damage(run_dir: Path, checkpoint: Path) -> None:
    launch = start(run_dir)
    launch.train(3)
    launch.save(checkpoint)
    file = checkpoint / MANIFEST_NAME
    file.write_text(json.dumps({**json.loads(file.read_text()), "v": 99}))
    assert errors(checkpoint) == []
    assert any("not compared" in finding.message and "99" in finding.message for finding in verify(checkpoint))

"""Causes on Accelerate with one process. `plan.again` are options of the script, hooks get the launch."""

import shutil
import zipfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.planted_bugs.plan import Acts, Plan, cause
from chronicle.journal import JournalWriter, read_journal
from chronicle.paths import RunPaths
from rollback.checkpoint.manifest import digest_file, read_manifest, write_manifest

ACC = "accelerate"


def reseal(checkpoint: Path) -> None:
    """Write the manifest's digests anew, as if the save itself had written the wrong state: only memory can tell."""
    if checkpoint.is_file():
        reseal_file(checkpoint)
        return
    manifest = read_manifest(checkpoint)
    if manifest is not None:
        write_manifest(checkpoint, step=manifest.step, memory=manifest.memory, run=manifest.run, launch=manifest.launch)


def reseal_file(path: Path) -> None:
    """The same for a checkpoint that is one file, whose digest stands in the journal."""
    paths = RunPaths(path.parent / "logs" / "run")
    if not paths.journal_dir.is_dir():
        return
    saved = [entry for entry in read_journal(paths).of_kind("checkpoint") if entry.data.get("path") == str(path)]
    data = {"path": str(path), "sha256": digest_file(path)[0]}
    if saved:
        with JournalWriter(paths) as writer:
            writer.append("guard.digest", step=saved[-1].step, refs=(saved[-1].id,), data=data)


def edited(name: str, change: Any) -> Any:
    """A hook that loads a state file with torch, changes it, writes it back and seals it again."""

    def edit(checkpoint: Path) -> None:
        state = torch.load(checkpoint / name, weights_only=False)
        torch.save(change(state) or state, checkpoint / name)
        reseal(checkpoint)

    return edit


def _registered(plan: Plan) -> None:
    plan.first.update(prepare=False, register=True)


@cause(ACC, "scheduler neither prepared nor registered", "seed exp9; accelerate, silent in 1.15")
def _(plan: Plan) -> None:
    plan.again["prepare"] = False


@cause(ACC, "stray custom_checkpoint_0.pkl.orig beside the state", "accelerate #1563")
def _(plan: Plan) -> None:
    _registered(plan)
    plan.files.append(lambda c: shutil.copy(c / "custom_checkpoint_0.pkl", c / "custom_checkpoint_0.pkl.orig"))


@cause(ACC, "custom_checkpoint_0.pkl renamed to .orig", "seed exp9")
def _(plan: Plan) -> None:
    _registered(plan)
    plan.files.append(lambda c: (c / "custom_checkpoint_0.pkl").rename(c / "custom_checkpoint_0.pkl.orig"))


@cause(ACC, "scheduler.bin is an empty dict", "formats §4 row 7")
def _(plan: Plan) -> None:
    plan.first["scheduler"] = "CosineAnnealingLR"
    plan.files.append(edited("scheduler.bin", lambda state: {"_": 0}))


@cause(ACC, "scheduler.bin deleted", "transformers #25865")
def _(plan: Plan) -> None:
    plan.files.append(lambda c: (c / "scheduler.bin").unlink())


@cause(ACC, "LR edited in the scheduler file only (the seed's edit)", "seed 003; launch_resume_evidence §0 row 1")
def _(plan: Plan) -> None:
    def halve(state: dict[str, Any]) -> None:
        state["base_lrs"] = [lr / 2 for lr in state["base_lrs"]]
        state["_last_lr"] = [lr / 2 for lr in state["_last_lr"]]

    plan.files.append(edited("scheduler.bin", halve))


@cause(ACC, "LR edited in the optimizer's groups only", "formats §3")
def _(plan: Plan) -> None:
    def halve(state: dict[str, Any]) -> None:
        for group in state["param_groups"]:
            group["lr"] /= 2

    plan.files.append(edited("optimizer.bin", halve))


@cause(ACC, "optimizer.bin with empty state", "formats §4 row 9; KempnerForge #115")
def _(plan: Plan) -> None:
    plan.files.append(edited("optimizer.bin", lambda state: {**state, "state": {}}))


@cause(ACC, "optimizer state of some parameters dropped", "pytorch #192202")
def _(plan: Plan) -> None:
    plan.files.append(edited("optimizer.bin", lambda s: {**s, "state": {k: v for k, v in s["state"].items() if k < 3}}))


@cause(ACC, "moments set to zero after the load", "pytorch #140898")
def _(plan: Plan) -> None:
    def zero(launch: Any) -> None:
        for state in launch.optimizer.state.values():
            state["exp_avg"].zero_()
            state["exp_avg_sq"].zero_()

    plan.after_load.append(zero)


@cause(ACC, "optimizer.bin of another step", "swapped files")
def _(plan: Plan) -> None:
    def older(state: dict[str, Any]) -> None:
        for entry in state["state"].values():
            entry["step"] = entry["step"] - 5
            entry["exp_avg"] *= 0.7

    plan.files.append(edited("optimizer.bin", older))


@cause(ACC, "LR and betas of the second group lost", "pytorch #143828")
def _(plan: Plan) -> None:
    def lose(state: dict[str, Any]) -> None:
        state["param_groups"][1] |= {"lr": 1e-3, "initial_lr": 1e-3}

    plan.files.append(edited("optimizer.bin", lose))


@cause(ACC, "initial_lr missing in the optimizer", "pytorch #140900")
def _(plan: Plan) -> None:
    def lose(launch: Any) -> None:
        for group in launch.optimizer.param_groups:
            group.pop("initial_lr")

    plan.after_load.append(lose)


@cause(ACC, "weight file of another model state", "speculators PR #739")
def _(plan: Plan) -> None:
    from safetensors.torch import load_file, save_file

    def other(checkpoint: Path) -> None:
        state = load_file(checkpoint / "model.safetensors")
        save_file({k: v + 0.01 for k, v in state.items()}, checkpoint / "model.safetensors", {"format": "pt"})

    plan.files.append(other)


def _flip(name: str) -> Any:
    def flip(checkpoint: Path) -> None:
        data = bytearray((checkpoint / name).read_bytes())
        data[len(data) // 2] ^= 0x10
        (checkpoint / name).write_bytes(data)

    return flip


@cause(ACC, "one bit flipped in model.safetensors", "safetensors has no checksum")
def _(plan: Plan) -> None:
    plan.files.append(_flip("model.safetensors"))


@cause(ACC, "one bit flipped in a tensor of optimizer.bin", "pytorch #126952")
def _(plan: Plan) -> None:
    def flip(checkpoint: Path) -> None:
        path = checkpoint / "optimizer.bin"
        with zipfile.ZipFile(path) as archive:
            record = next(i for i in archive.infolist() if "/data/" in i.filename and i.file_size >= 256)
        data = bytearray(path.read_bytes())
        data[record.header_offset + 30 + len(record.filename) + 128] ^= 0x40
        path.write_bytes(data)

    plan.files.append(flip)


@cause(ACC, "model.safetensors truncated", "torch.save on a full disk")
def _(plan: Plan) -> None:
    plan.files.append(lambda c: (c / "model.safetensors").write_bytes((c / "model.safetensors").read_bytes()[:-64]))


@cause(ACC, "random_states_0.pkl missing", "accelerate #4283")
def _(plan: Plan) -> None:
    plan.files.append(lambda c: (c / "random_states_0.pkl").unlink())


@cause(ACC, "random_states_0.pkl unreadable", "accelerate #4283")
def _(plan: Plan) -> None:
    plan.files.append(lambda c: (c / "random_states_0.pkl").write_bytes(b"garbage"))


@cause(ACC, "generators seeded again after the load, file intact", "tunix #2288")
def _(plan: Plan) -> None:
    plan.files.append(
        edited(
            "random_states_0.pkl", lambda s: {**s, "torch_manual_seed": torch.Generator().manual_seed(0).get_state()}
        )
    )


@cause(ACC, "load_state before prepare", "Flow-Factory #172")
def _(plan: Plan) -> None:
    plan.again["prepared"] = False
    plan.after_load.append(lambda launch: launch.prepare())


@cause(ACC, "nothing loaded: resume flag forgotten", "verl #7952")
def _(plan: Plan) -> None:
    plan.again["load"] = False


@cause(ACC, "scheduler drives another optimizer object", "DeepSpeed #4344")
def _(plan: Plan) -> None:
    def rebind(launch: Any) -> None:
        launch.scheduler.scheduler.optimizer = torch.optim.AdamW(
            [{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(2)], lr=1e-2
        )

    plan.after_load.append(rebind)


@cause(ACC, "optimizer rebuilt after the load", "DeepSpeed #4344")
def _(plan: Plan) -> None:
    def rebuild(launch: Any) -> None:
        launch.optimizer = torch.optim.AdamW(launch.model.parameters(), lr=1e-2)

    plan.after_load.append(rebuild)


@cause(ACC, "scheduler stepped once more after the load", "slime PR #1547")
def _(plan: Plan) -> None:
    plan.after_load.append(lambda launch: launch.scheduler.scheduler.step())


@cause(ACC, "scheduler's position doubled on load", "slime PR #1547")
def _(plan: Plan) -> None:
    plan.files.append(edited("scheduler.bin", lambda s: {**s, "last_epoch": s["last_epoch"] * 2}))


@cause(ACC, "horizon of the schedule rebuilt with another length", "OneTrainer #1604; transformers #27749")
def _(plan: Plan) -> None:
    plan.first["scheduler"] = "CosineAnnealingLR"
    plan.after_load.append(lambda launch: setattr(launch.scheduler.scheduler, "T_max", 60))


@cause(ACC, "scheduler class changed", "formats §4 row 6")
def _(plan: Plan) -> None:
    plan.first["scheduler"] = "CosineAnnealingLR"
    plan.again["scheduler"] = "StepLR"


@cause(ACC, "lambda built from the decayed LR", "nanotron PR #256")
def _(plan: Plan) -> None:
    def decay(launch: Any) -> None:
        scheduler = launch.scheduler.scheduler
        scheduler.base_lrs = list(scheduler._last_lr)

    plan.after_load.append(decay)


@cause(ACC, "gradient accumulation doubled", "transformers PR #43718")
def _(plan: Plan) -> None:
    plan.again["accumulation"] = 2


@cause(ACC, "batch size doubled", "transformers PR #43718")
def _(plan: Plan) -> None:
    plan.again["batch"] = 8


@cause(ACC, "model in bfloat16 instead of float32", "OpenTau #185")
def _(plan: Plan) -> None:
    plan.again["dtype"] = torch.bfloat16


@cause(ACC, "two parameter groups became one", "OpenTau; M3")
def _(plan: Plan) -> None:
    def merge(state: dict[str, Any]) -> dict[str, Any]:
        group = {**state["param_groups"][0], "params": [0, 1, 2, 3]}
        return {**state, "param_groups": [group]}

    plan.again["one_group"] = True
    plan.files.append(edited("optimizer.bin", merge))
    plan.files.append(
        edited("scheduler.bin", lambda s: {**s, "base_lrs": s["base_lrs"][:1], "_last_lr": s["_last_lr"][:1]})
    )


@cause(ACC, "data starts again: no skip_first_batches", "accelerate #2016, #2823")
def _(plan: Plan) -> None:
    plan.after_load.append(lambda launch: setattr(launch, "skip", False))


@cause(ACC, "shuffle of another seed: same position, other order", "transgenic #59")
def _(plan: Plan) -> None:
    def reshuffle(launch: Any) -> None:
        launch.loader.set_epoch(5)

    plan.after_load.append(reshuffle)


@cause(ACC, "skip_first_batches applied in every epoch", "accelerate #1451; open-instruct PR #681", acts=Acts.LATER)
def _(plan: Plan) -> None:
    plan.after_load.append(lambda launch: setattr(launch, "skip_in_every_epoch", True))
    plan.num_steps = 230


@cause(ACC, "LR set by hand from the second step on", "Megatron-LM #1138", acts=Acts.LATER)
def _(plan: Plan) -> None:
    def override(launch: Any) -> None:
        for group in launch.optimizer.param_groups:
            group["lr"] = 1e-3

    plan.at_step.update(dict.fromkeys(range(2, 26), override))


@cause(ACC, "files saved, manifest never written: killed in the save", "transformers #35782")
def _(plan: Plan) -> None:
    plan.files.append(lambda c: (c / "chronicle-manifest.json").unlink(missing_ok=True))


@cause(ACC, "resume from a copy of the directory with an extra weights file", "accelerate b_stray")
def _(plan: Plan) -> None:
    plan.files.append(lambda c: shutil.copy(c / "model.safetensors", c / "model.safetensors.bak"))


@cause(ACC, "SGD momentum lost", "KempnerForge #115")
def _(plan: Plan) -> None:
    plan.first["optimizer"] = "SGD"
    plan.files.append(edited("optimizer.bin", lambda s: {**s, "state": {}}))

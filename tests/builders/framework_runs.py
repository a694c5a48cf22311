"""Tiny single-process runs of other writers: HF Trainer, Lightning, DCP, plain torch.

Usage: framework_runs.py OUT '{"writer": "trainer", "steps": 10}'.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch


def trainer(out: Path, options: dict[str, Any]) -> None:
    """`checkpoint-N` of transformers' Trainer; with `deepspeed` (a ZeRO stage) the engine's files lie in it."""
    if "deepspeed" in options:
        from deepspeed_run import config_of, deepspeed

        deepspeed.init_distributed("gloo")
        config = {**config_of({"stage": options["deepspeed"]}), "train_micro_batch_size_per_gpu": "auto"}
    from transformers import Trainer, TrainerCallback, TrainingArguments

    used: list[float] = []

    class Witness(TrainerCallback):
        def on_step_begin(self, _args: Any, _state: Any, _control: Any, **objects: Any) -> None:
            used.append(objects["optimizer"].param_groups[0]["lr"])

    class Small(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
            y = self.layer(x)
            return {"loss": (y - (labels if labels is not None else 0)).pow(2).mean(), "logits": y}

    data = [{"x": torch.randn(4), "labels": torch.randn(1)} for _ in range(64)]
    arguments = TrainingArguments(
        output_dir=str(out),
        max_steps=options.get("max_steps", options.get("steps", 10)),
        save_steps=options.get("save_every", options.get("steps", 10)),
        save_strategy="no" if options.get("resume") else "steps",
        logging_steps=1,
        learning_rate=1e-3,
        warmup_steps=2,
        lr_scheduler_type=options.get("kind", "linear"),
        per_device_train_batch_size=4,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        deepspeed=config if "deepspeed" in options else None,
        **options.get("arguments", {}),
    )
    resume = options.get("resume")
    trainer = Trainer(model=Small(), args=arguments, train_dataset=data, callbacks=[Witness()])
    trainer.train(resume_from_checkpoint=str(out / resume) if resume else None)
    if resume:
        (out.parent / "used.json").write_text(json.dumps(used))


def lightning(out: Path, options: dict[str, Any]) -> None:
    """`epoch=E-step=N.ckpt` of Lightning."""
    import lightning as L

    class Small(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return self.layer(batch[0]).pow(2).mean()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(64, 4)), batch_size=4)
    for resume in options.get("resume", [None]):
        used = _fit(Small(), data, out, options, resume)
        if resume:
            told = out.parent / "used.json"
            known = json.loads(told.read_text()) if told.exists() else {}
            told.write_text(json.dumps({**known, resume: {"first": options["steps"] - len(used), "lrs": used}}))


def _fit(model: Any, data: Any, out: Path, options: dict[str, Any], resume: str | None) -> list[float]:
    """One launch of Lightning, from the checkpoint `resume` where there is one; the LR of every batch."""
    import lightning as L
    from lightning.pytorch.callbacks import ModelCheckpoint

    steps = options.get("steps", 10)
    every = ModelCheckpoint(dirpath=out, every_n_train_steps=options.get("save_every", steps), save_top_k=-1,
                            save_last=options.get("last", False))  # fmt: skip
    used: list[float] = []

    class Witness(L.Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            used.append(trainer.optimizers[0].param_groups[0]["lr"])

    trainer = L.Trainer(max_steps=steps, max_epochs=None, accelerator="cpu", logger=False, enable_progress_bar=False,
                        enable_model_summary=False, callbacks=[*([] if resume else [every]), Witness()],
                        enable_checkpointing=not resume)  # fmt: skip
    trainer.fit(model, data, ckpt_path=str(out / resume) if resume else None)
    return used


class DcpApp:
    """An app state as torchtitan has it: two parameter groups, with `flat` the keys of the optimizer flattened."""

    def __init__(self, flat: bool) -> None:
        from torch.distributed.checkpoint.state_dict import StateDictOptions

        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
        groups = [{"params": self.model[0].parameters()}, {"params": self.model[1].parameters(), "lr": 5e-4}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: max(0.0, 1 - step / 100))
        self.options = StateDictOptions(flatten_optimizer_state_dict=flat)

    def train(self, steps: int) -> list[list[float]]:
        """The LRs that each of the next steps uses."""
        used = []
        for _ in range(steps):
            used.append([group["lr"] for group in self.optimizer.param_groups])
            self.model(torch.randn(3, 4)).pow(2).mean().backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        return used

    def state(self, step: int) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        return {
            "app": {
                "model": self.model.state_dict(),
                "optim": get_optimizer_state_dict(self.model, self.optimizer, options=self.options),
                "lr_scheduler": self.scheduler.state_dict(),
                "train_state": {"step": step},
            }
        }

    def load(self, path: Path) -> None:
        import torch.distributed.checkpoint as distributed_checkpoint
        from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

        self.train(1)  # an optimizer without a step has no state to load into
        state = self.state(0)
        distributed_checkpoint.load(state, checkpoint_id=str(path))
        self.model.load_state_dict(state["app"]["model"])
        set_optimizer_state_dict(self.model, self.optimizer, state["app"]["optim"], options=self.options)
        self.scheduler.load_state_dict(state["app"]["lr_scheduler"])


def dcp(out: Path, options: dict[str, Any]) -> None:
    """A torch Distributed Checkpoint directory of an app state, as torchtitan names it."""
    import torch.distributed.checkpoint as distributed_checkpoint

    app, steps = DcpApp(bool(options.get("flat"))), options.get("steps", 10)
    app.train(steps)
    distributed_checkpoint.save(app.state(steps), checkpoint_id=str(out / f"step-{steps}"))


def plain(out: Path, options: dict[str, Any]) -> None:
    """One `torch.save` of everything, as a thousand scripts do, in either container."""
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    for _ in range(options.get("steps", 10)):
        model(torch.randn(3, 4)).pow(2).mean().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(),
             "step": options.get("steps", 10), "epoch": 1}  # fmt: skip
    torch.save(state, out / options.get("name", "ckpt.pt"), _use_new_zipfile_serialization=not options.get("legacy"))


if __name__ == "__main__":
    given = json.loads(sys.argv[2])
    {"trainer": trainer, "lightning": lightning, "dcp": dcp, "plain": plain}[given["writer"]](Path(sys.argv[1]), given)

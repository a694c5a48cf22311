"""Cells of the exact-resume matrix over a data plan: `python plan_cells.py PLACE KIND PHASE CELLS` trains each cell in turn.

A cell is a name of its parts. In phase `first` it is trained without a stop, and up to its save; in phase `rest`, another
process, it goes on from the save to the end. Each rank writes the sha256 of every local tensor of weights and optimizers, and
all losses, to `PLACE/<cell>/<side>-<rank>.json`.
"""

import contextlib
import hashlib
import json
import os
import random
import sys
from itertools import chain, repeat
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from bit_transformer.model.transformer import BitTransformer, ModelConfig
from bit_transformer.recipes import OptimizerConfig
from bit_transformer.training.setup import build_optimizers
from chronicle.data import PlanDataset

BATCH, LENGTH = 8, 16


def decode(sample):
    return {"x": torch.tensor(list(sample["txt"][:LENGTH]), dtype=torch.float32) / 255}


def window(sample):
    return torch.tensor(list(sample["txt"][:17]), dtype=torch.uint8)


def indexes(place):
    return {place / "web.index": 3, place / "code.index": 1}


def dataset(place):
    return PlanDataset(indexes(place), seed=4, decode=decode)


class Net(nn.Module):
    def __init__(self, losses, dropout):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(LENGTH, 24), nn.ReLU(), nn.Dropout(dropout), nn.Linear(24, 1))
        self.losses = losses

    def forward(self, x):
        loss = (self.body(x) - x.mean()).square().mean()
        self.losses.append(float(loss.detach()))
        return {"loss": loss}


def told(path, modules, optimizers, losses):
    """Write what a side came to."""
    digest = hashlib.sha256()

    def add(value):
        if isinstance(value, torch.Tensor):
            value = value.to_local() if hasattr(value, "to_local") else value
            digest.update(value.detach().contiguous().view(torch.uint8).numpy().tobytes() if value.dim() else
                          repr(value.item()).encode())  # fmt: skip
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                digest.update(str(key).encode())
                add(value[key])
        elif isinstance(value, list | tuple):
            for one in value:
                add(one)
        else:
            digest.update(repr(value).encode())

    for module in modules:
        add(module.state_dict())
    for optimizer in optimizers:
        add(optimizer.state_dict())
    path.write_text(json.dumps({"digest": digest.hexdigest(), "losses": losses}))


# --- A plan under loops and trainers of others: (framework, workers, accumulation, where it is saved)


def steps_of(data, accumulation, where):
    """Return (step of the save, last step): the save lies in the middle of the first pass, or at its end."""
    epoch = -(-len(data) // (BATCH * accumulation))
    return (epoch, epoch + 4) if where == "end" else (epoch // 2, epoch + 3)


def torch_loop(net, loader, accumulation, save, end, path, resumed):
    optimizer, step, count = torch.optim.AdamW(net.parameters(), lr=0.01), 0, 0
    if resumed:
        saved = torch.load(path / "torch.pt", weights_only=False)
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["data"])
        torch.set_rng_state(saved["rng"])
        step = saved["step"]
    while step < end:
        for batch in loader:
            net(**batch)["loss"].div(accumulation).backward()
            count += 1
            if count % accumulation == 0:
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                if step == save:
                    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "data": loader.state_dict(),
                                "rng": torch.get_rng_state(), "step": step}, path / "torch.pt")
                if step == end:
                    break
    return [net], [optimizer]


def accelerate_loop(net, loader, accumulation, save, end, path, resumed):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=False)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    optimizer, step = torch.optim.AdamW(net.parameters(), lr=0.01), 0
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    accelerator.register_for_checkpointing(loader)
    if resumed:
        accelerator.load_state(str(path / "accelerate"))
        step = save
    while step < end:
        for batch in loader:
            with accelerator.accumulate(net):
                accelerator.backward(net(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                step += 1
                if step == save and not resumed:
                    accelerator.save_state(str(path / "accelerate"))
                if step == end:
                    break
    return [net], [optimizer]


def trainer_loop(net, loader, accumulation, save, end, path, resumed):
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Save(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_save = state.global_step == save

    arguments = TrainingArguments(str(path / "trainer"), per_device_train_batch_size=BATCH, max_steps=end, save_strategy="no",
                                  use_cpu=True, report_to=[], disable_tqdm=True, gradient_accumulation_steps=accumulation,
                                  logging_strategy="no")  # fmt: skip
    trainer = Trainer(net, arguments, callbacks=[Save()])
    loader.attach(trainer)
    trainer.train(resume_from_checkpoint=str(path / f"trainer/checkpoint-{save}") if resumed else None)
    return [trainer.model], [trainer.optimizer]


def lightning_loop(net, loader, accumulation, save, end, path, resumed):
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net

        def training_step(self, batch, index):
            return self.net(**batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    class Save(pl.Callback):
        saved = False

        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == save and not resumed and not self.saved:
                self.saved = True
                trainer.save_checkpoint(path / "lightning.ckpt")

    trainer = pl.Trainer(accelerator="cpu", devices=1, max_steps=end, max_epochs=-1, logger=False, enable_checkpointing=False,
                         enable_progress_bar=False, enable_model_summary=False, accumulate_grad_batches=accumulation,
                         callbacks=[Save()], default_root_dir=path)  # fmt: skip
    module = Module()
    trainer.fit(module, loader, ckpt_path=path / "lightning.ckpt" if resumed else None)
    return [module], trainer.optimizers


LOOPS = {"torch": torch_loop, "accelerate": accelerate_loop, "trainer": trainer_loop, "lightning": lightning_loop}


def play(place, cell, side):
    framework, workers, accumulation, where = cell.split("-")
    data, path, losses = dataset(place), place / cell, []
    path.mkdir(exist_ok=True)
    save, end = steps_of(data, int(accumulation), where)
    # Lightning keeps no random generators: without dropout there, as a user of it has no exact resume with it
    net = Net(losses, 0.0 if framework == "lightning" else 0.2)
    torch.manual_seed(1)
    loader = data.loader(BATCH, rank=0, world_size=1, num_workers=int(workers))
    stop = save if side == "half" and framework in ("torch", "accelerate") else end
    modules, optimizers = LOOPS[framework](net, loader, int(accumulation), save, stop, path, side == "rest")
    told(path / f"{side}-0.json", modules, optimizers, losses)


# --- The modern recipe on the plan: (sharding, precision, accumulation, compiled)


def modern(place, cell, side):
    from torch.distributed.checkpoint import FileSystemReader, load, save
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    _, sharding, precision, accumulation, compiled = cell.split("-")
    path, accumulation, at, end = place / cell, int(accumulation), 4, 8
    path.mkdir(exist_ok=True)
    torch.manual_seed(0)
    model = whole = BitTransformer(ModelConfig(d_model=32, num_heads=2, num_layers=2, d_ff=128, max_bits=256, vocab=256,
                                               norm="pre", rotary=True, qk_norm=True))
    wrapped = model
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if sharding == "fsdp2":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if precision == "bf16" else MixedPrecisionPolicy()
        wrapped = fully_shard(model, mp_policy=policy)
    optimizers = build_optimizers(model, OptimizerConfig(lr=0.01, muon_lr=0.02))
    if sharding == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model)
    wrapped = torch.compile(wrapped) if compiled == "compile" else wrapped
    loader = PlanDataset(indexes(place), seed=4, decode=window).loader(4, rank=rank, world_size=world)
    first, losses = 1, []
    if side == "rest":
        weights, moments = get_state_dict(whole, optimizers)
        held = {"model": weights, "optimizers": moments}
        load(held, storage_reader=FileSystemReader(path / "saved"), no_dist=world == 1)
        set_state_dict(whole, optimizers, model_state_dict=held["model"], optim_state_dict=held["optimizers"])
        loader.load_state_dict(json.loads((path / "data.json").read_text()))
        first = at + 1
    batches = chain.from_iterable(repeat(loader))  # pass after pass
    rounded = precision == "bf16" and sharding != "fsdp2"
    autocast = torch.autocast("cpu", torch.bfloat16) if rounded else contextlib.nullcontext()
    for step in range(first, (at if side == "half" else end) + 1):
        total = 0.0
        for part in range(accumulation):
            text = next(batches).long()
            quiet = wrapped.no_sync() if sharding == "ddp" and part < accumulation - 1 else contextlib.nullcontext()
            with quiet, autocast:
                out = wrapped(text[:, :-1]).logits_BTV
                loss = nn.functional.cross_entropy(out.float().flatten(0, 1), text[:, 1:].flatten()) / accumulation
                loss.backward()
            total += float(loss.detach())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append([step, total])
        if step == at and side == "half":
            weights, moments = get_state_dict(whole, optimizers)
            save({"model": weights, "optimizers": moments}, checkpoint_id=path / "saved", no_dist=world == 1)
            if rank == 0:
                (path / "data.json").write_text(json.dumps(loader.state_dict()))
    told(path / f"{side}-{rank}.json", [whole], optimizers, losses)


def main():
    place, phase, cells = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    torch.set_num_threads(1)
    random.seed(0)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    for cell in cells:
        for side in ("whole", "half") if phase == "first" else ("rest",):
            (modern if cell.startswith("modern") else play)(place, cell, side)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

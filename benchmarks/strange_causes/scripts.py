"""One training of a small language model, written as a plain loop and with Accelerate.

Every script is built from the same options, saves on its way, goes on for some steps and ends: a run that was killed later. A
resume builds it again, with other options where a cause changes them, loads, and trains on.
"""

import contextlib
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

import chronicle
from benchmarks.planted_bugs.schedulers import warm_up

__all__ = ["FORMS", "OPTIONS", "Rows", "Script"]

Hook = Callable[[Any], object]
VOCABULARY, PAD, BLOCK, NUM_ROWS, BATCH = 40, 0, 12, 96, 8
SAVED_AT, NUM_FIRST, NUM_AGAIN = 18, 30, 14  # optimizer steps; Lightning saves at 12
OPTIONS: dict[str, Any] = {
    "dropout": 0.0, "act": functional.gelu, "eps": 1e-5, "theta": 10_000.0, "norm": torch.nn.LayerNorm, "tied": False,
    "temperature": 1.0, "window": None, "smoothing": 0.0, "ignored": -100, "reduction": "mean", "weights": None,
    "auxiliary": 0.0, "file": "tokens.npy", "split": slice(0, NUM_ROWS), "block": BLOCK, "noise": 0.0, "side": "right",
    "mapping": None, "labels": None, "shuffle": True, "seed": 0, "drop_last": False, "batch": BATCH, "accumulation": 1,
    "optimizer": torch.optim.AdamW, "lr": 5e-3, "betas": (0.9, 0.999), "scheduler": "lambda", "clip": 0.5, "autocast": False,
    "scaler": False, "ema": False, "frozen": (), "decay_all": True, "steps_of_scheduler": 1, "rng": True, "load": True,
    "strict": True, "parts": ("model", "optimizer", "scheduler", "step"), "compiled": False, "fused": False, "sampler": None,
    "zero_grad": True, "lora": 0.0, "quantised": False, "collate": None, "arguments": {}, "trainer": {}, "config": {},
    "loss": None, "callbacks": (), "fast_loader": 0, "divide": True, "hparams": {}, "model_kind": None, "skip": True,
    "promise": False, "hook": None,
    "num_steps": 1, "zero_early": False, "backwards": 1, "hand_scale": None, "clip_part": None, "hand_decay": 0.0,
    "detached": False, "odd_skipped": False, "accumulate": True, "half_logits": False, "anneal": False, "spoil": False,
    "numpy_noise": 0.0, "numpy_rng": True, "seedable": True, "positions": None, "ema_every": 1, "hide_nan": False,
    "seed_each": False, "logged": False, "per_step": None,
}  # fmt: skip


class Attention(torch.nn.Module):
    """Causal, one head, with rotary positions."""

    def __init__(self, dim: int, dropout: float, theta: float, window: int | None) -> None:
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(dim, 3 * dim), torch.nn.Linear(dim, dim)
        self.dropout, self.window = torch.nn.Dropout(dropout), window
        self.register_buffer("frequencies", theta ** (-torch.arange(0, dim, 2) / dim), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        angles = torch.arange(x.shape[1])[:, None] * self.frequencies
        q, k = (self._turn(part, angles) for part in (q, k))
        scores = q @ k.transpose(-1, -2) / math.sqrt(x.shape[-1])
        unseen = torch.ones_like(scores[0]).triu(1).bool()
        if self.window is not None:
            unseen |= torch.ones_like(scores[0]).tril(-self.window).bool()
        return self.out(self.dropout(scores.masked_fill(unseen, -1e9).softmax(-1)) @ v)

    @staticmethod
    def _turn(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        a, b = x.float().chunk(2, -1)
        turned = torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), -1)
        return turned.to(x.dtype)


class Net(torch.nn.Module):
    """Two blocks of attention and an MLP."""

    def __init__(self, o: dict[str, Any]) -> None:
        super().__init__()
        dim = 16
        self.embedding = torch.nn.Embedding(VOCABULARY, dim)
        self.blocks = torch.nn.ModuleList(Attention(dim, o["dropout"], o["theta"], o["window"]) for _ in range(2))
        self.norms = torch.nn.ModuleList(o["norm"](dim, eps=o["eps"]) for _ in range(2))
        self.mlp = torch.nn.ModuleList(torch.nn.Linear(dim, dim) for _ in range(2))
        self.head = torch.nn.Linear(dim, VOCABULARY, bias=False)
        if o["tied"]:
            self.head.weight = self.embedding.weight
        self.lora_a, self.lora_b = (torch.nn.Parameter(torch.randn(*shape) * 0.1) for shape in ((dim, 2), (2, dim)))
        self.act, self.temperature, self.lora, self.quantised = o["act"], o["temperature"], o["lora"], o["quantised"]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block, norm, mlp in zip(self.blocks, self.norms, self.mlp, strict=True):
            x = x + block(norm(x))
            x = x + self.act(mlp(norm(x)))
        x = x + self.lora * (x @ self.lora_a @ self.lora_b)
        if self.quantised:
            x = x + ((x * 4).round() / 4 - x).detach()
        return self.head(x) / self.temperature


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Rows of tokens from a file; row i is as long as its content."""

    def __init__(self, path: Path, part: slice, block: int, noise: float) -> None:
        self.path, self.block, self.noise = path, block, noise
        self.rows = np.load(path)[part]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        row = torch.from_numpy(self.rows[index]).long()
        row = row[row != PAD][: self.block]
        if self.noise:
            hit = torch.rand(len(row), generator=torch.Generator().manual_seed(index)) < self.noise
            row = torch.where(hit, torch.ones_like(row), row)
        return row


def write_tokens(path: Path, seed: int = 0) -> None:
    """A file of rows: a number sequence with some regularity, padded."""
    rng = np.random.default_rng(seed)
    rows = np.zeros((NUM_ROWS, BLOCK), dtype=np.int16)
    for row in rows:
        length = int(rng.integers(6, BLOCK + 1))
        start, step = rng.integers(2, VOCABULARY), rng.integers(1, 4)
        row[:length] = 2 + (start + step * np.arange(length)) % (VOCABULARY - 2)
    np.save(path, rows)


class Script:
    """What all forms have in common. Hooks of causes get this object."""

    def __init__(self, folder: Path, run: Path | None, options: dict[str, Any]) -> None:
        self.folder, self.run, self.o = folder, run, {**OPTIONS, **options}
        if not (folder / "tokens.npy").exists():
            write_tokens(folder / "tokens.npy")
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        self.steps = 0
        self.rows: list[float] = []  # losses
        self.hook_at: dict[int, Hook] = {}
        self.feed: Iterator[Any] | None = None  # of a loop of the script's own
        self.calls = 0  # of the loss: what an annealed part of it follows
        self.numpy_state: Any = None  # to be restored when the batches that were seen are skipped
        self.followed: Any = None  # what the average follows, where it is not the model

    def make_rows(self) -> Rows:
        """The data set."""
        o = self.o
        return Rows(self.folder / o["file"], o["split"], o["block"], o["noise"])

    def make_model(self) -> Any:
        """The model."""
        model = Net(self.o)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(tuple(self.o["frozen"]) or ("-",)))
        if (factor := self.o["hook"]) is not None:
            model.mlp[0].weight.register_hook(lambda gradient: gradient * factor)
        return model

    def make_optimizer(self, model: Any) -> Any:
        """Two groups: with weight decay and without."""
        o = self.o
        trained = [p for p in model.parameters() if p.requires_grad]
        wide = [p for p in trained if p.dim() > 1 or not o["decay_all"]]
        rest = [p for p in trained if not any(p is q for q in wide)]
        groups = [{"params": wide, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        if o["optimizer"] in (torch.optim.AdamW, torch.optim.Adam):
            return o["optimizer"](groups, lr=o["lr"], betas=o["betas"], fused=o["fused"] or None)
        return o["optimizer"](groups, lr=o["lr"])

    def make_scheduler(self, optimizer: Any) -> Any:
        """The schedule."""
        kinds = torch.optim.lr_scheduler
        made = {
            "lambda": lambda: kinds.LambdaLR(optimizer, warm_up),
            "cosine": lambda: kinds.CosineAnnealingLR(optimizer, 60),
            "plateau": lambda: kinds.ReduceLROnPlateau(optimizer, patience=4, factor=0.5),
        }
        return made[self.o["scheduler"]]()

    def collate(self, rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids, labels), padded."""
        o, width = self.o, max(len(row) for row in rows)
        left = o["side"] == "left"
        ids = torch.stack([functional.pad(r, (width - len(r), 0) if left else (0, width - len(r)), value=PAD) for r in rows])
        if o["numpy_noise"]:
            ids = torch.where(torch.from_numpy(np.random.rand(*ids.shape) < o["numpy_noise"]) & (ids != PAD), 1, ids)
        if o["spoil"]:  # rows that were read are overwritten in the data set's own memory
            self.rows_of_data.rows[:, 2:5] = np.roll(self.rows_of_data.rows[:, 2:5], 1, axis=0)
        if o["mapping"] is not None:
            ids = torch.where(ids == PAD, ids, 1 + (ids + o["mapping"]) % (VOCABULARY - 1))
        labels = torch.where(ids == PAD, -100, ids)
        return ids, labels if o["labels"] is None else o["labels"](ids, labels)

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Next token."""
        o = self.o
        if o["loss"] is not None:
            return o["loss"](logits, labels)
        if o["half_logits"]:
            logits = logits.bfloat16()
        self.calls += 1
        flat, target = logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
        if o["ignored"] != -100:
            target = target.clamp(min=0)
        weight = None if o["weights"] is None else torch.linspace(*o["weights"], VOCABULARY)
        loss = functional.cross_entropy(
            flat, target, weight, ignore_index=o["ignored"], label_smoothing=o["smoothing"], reduction=o["reduction"]
        )
        share = min(1.0, self.calls / 40) if o["anneal"] else 1.0
        return loss + share * o["auxiliary"] * flat.logsumexp(-1).square().mean()

    def by_hand(self, model: Any) -> None:
        """What the loop does to gradients itself, right before the optimizer."""
        o = self.o
        if o["clip_part"]:
            torch.nn.utils.clip_grad_norm_(model.get_submodule(o["clip_part"]).parameters(), 0.05)
        for p in model.parameters() if o["hand_scale"] or o["hide_nan"] else ():
            if p.grad is not None:
                p.grad.mul_(o["hand_scale"] or 1.0)
                p.grad.nan_to_num_()

    def decay_by_hand(self, model: Any) -> None:
        """A decay of the script's own, after the optimizer has stepped."""
        with torch.no_grad():
            for p in model.parameters() if self.o["hand_decay"] else ():
                p.mul_(1 - self.o["hand_decay"])

    def make_loader(self, rows: Rows, epoch: int = 0) -> Any:
        """The loader of one epoch; with a fixed seed its order is that of the epoch."""
        o = self.o
        sampler = None if o["sampler"] is None else o["sampler"](rows)
        shuffle = o["shuffle"] and sampler is None
        generator = torch.Generator().manual_seed(1000 * o["seed"] + epoch)
        return torch.utils.data.DataLoader(
            rows, o["batch"], shuffle=shuffle, sampler=sampler, drop_last=o["drop_last"], generator=generator,
            collate_fn=self.collate, num_workers=o["fast_loader"],
        )  # fmt: skip


class TorchScript(Script):
    """A plain loop; one file holds everything."""

    def build(self) -> None:
        o = self.o
        self.rows_of_data = self.make_rows()
        self.model: Any = self.make_model()
        self.optimizer: Any = self.make_optimizer(self.model)
        self.scheduler: Any = self.make_scheduler(self.optimizer)
        self.scaler = torch.amp.GradScaler("cpu", growth_interval=7) if o["scaler"] else None
        self.ema = None
        if o["ema"]:
            averages = torch.optim.swa_utils
            self.ema = averages.AveragedModel(self.model, multi_avg_fn=averages.get_ema_multi_avg_fn())
        if o["compiled"]:
            self.model.compile(backend="eager")
        if self.run is not None:
            named = {"averages": {"ema": self.ema}} if o["ema"] else {}
            self.guard = chronicle.attach(
                self.run,
                self.model,
                self.optimizer,
                self.scheduler,
                scaler=self.scaler,
                same_data=o["promise"],
                **named,
            )

    def train(self, last: int) -> None:
        """One loop over the data, also where a save interrupts it."""
        if self.feed is None:
            self.feed = self.batches()
        while self.steps < last:
            ids, labels, is_last = next(self.feed)
            self.micro_step(ids, labels, is_last=is_last)

    def batches(self) -> Iterator[Any]:
        """(ids, labels, whether a step follows), from where the loop's own counter stands."""
        o = self.o
        micro = self.steps * o["accumulation"]
        per_epoch = len(self.make_loader(self.rows_of_data))
        epoch, skip = divmod(micro, per_epoch) if o["skip"] else (0, 0)
        while True:
            for index, (ids, labels) in enumerate(self.make_loader(self.rows_of_data, epoch)):
                if index == skip - 1 and self.numpy_state is not None:
                    np.random.set_state(self.numpy_state)
                if index >= skip:
                    micro += 1
                    yield ids, labels, micro % o["accumulation"] == 0
            epoch, skip = epoch + 1, 0

    def micro_step(self, ids: torch.Tensor, labels: torch.Tensor, *, is_last: bool) -> None:
        o = self.o
        if o["seed_each"]:
            torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16, enabled=o["autocast"]):
            loss = self.loss(self.model(ids), labels) * (math.nan if o["hide_nan"] else 1)
        if o["divide"]:
            loss = loss / o["accumulation"]
        for left in reversed(range(o["backwards"])):
            (loss if self.scaler is None else self.scaler.scale(loss)).backward(retain_graph=left > 0)
        if not is_last:
            return
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if o["clip"]:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), o["clip"])
        self.by_hand(self.model)
        if (hook := self.hook_at.get(self.steps)) is not None:
            hook(self)
        if o["zero_early"]:
            self.optimizer.zero_grad()
        if self.scaler is None:
            for _ in range(o["num_steps"]):
                self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        for _ in range(o["steps_of_scheduler"]):
            self.scheduler.step(*((float(loss.detach()),) if o["scheduler"] == "plateau" else ()))
        if o["zero_grad"]:
            self.optimizer.zero_grad()
        self.decay_by_hand(self.model)
        if self.ema is not None and self.steps % o["ema_every"] == 0:
            self.ema.update_parameters(self.model if self.followed is None else self.followed)
        self.steps += 1
        self.rows.append(float(loss.detach()))

    def save(self) -> Path:
        path = self.folder / f"step-{self.steps}.pt"
        state = {
            "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.steps,
            "scheduler": self.scheduler.state_dict(), "rng": torch.get_rng_state(),
            **({"numpy": np.random.get_state()} if self.o["numpy_noise"] else {}),
            **({"scaler": self.scaler.state_dict()} if self.scaler else {}),
            **({"ema": self.ema.state_dict()} if self.ema else {}),
        }  # fmt: skip
        torch.save(state, path)
        return path

    def load(self, path: Path) -> None:
        o, state = self.o, torch.load(path, weights_only=False)
        if "model" in o["parts"]:
            self.model.load_state_dict(state["model"], strict=o["strict"])
        for part in ("optimizer", "scheduler"):
            if part in o["parts"]:
                getattr(self, part).load_state_dict(state[part])
        for part in ("scaler", "ema"):
            if part in state and part not in o.get("lost", ()) and getattr(self, part) is not None:
                getattr(self, part).load_state_dict(state[part])
        self.steps = state["step"] if "step" in o["parts"] else 0
        if o["rng"]:
            torch.set_rng_state(state["rng"])
        self.numpy_state = state.get("numpy") if o["numpy_rng"] else None

    def finish(self) -> None:
        """Write what is in memory, as the end of the process does."""
        if self.run is not None:
            self.guard.session.data.finish()


class AccelerateScript(Script):
    """Accelerate, one process, as in its examples."""

    def build(self) -> None:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState, GradientState, PartialState
        from accelerate.utils import DataLoaderConfiguration

        o = self.o
        AcceleratorState._reset_state(True), GradientState._reset_state(), PartialState._reset_state()
        self.accelerator: Any = Accelerator(
            cpu=True, gradient_accumulation_steps=o["accumulation"], mixed_precision="bf16" if o["autocast"] else "no",
            dataloader_config=DataLoaderConfiguration(use_seedable_sampler=o["seedable"], data_seed=o["seed"]), **o["trainer"],
        )  # fmt: skip
        if self.run is not None:
            chronicle.guard(self.accelerator, run_dir=self.run, same_data=o["promise"])
        model = self.make_model()
        optimizer = self.make_optimizer(model)
        scheduler = self.make_scheduler(optimizer)
        loader = self.make_loader(self.make_rows())
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(model, optimizer, loader, scheduler)

    def train(self, last: int) -> None:
        """One loop over the data, also where a save interrupts it."""
        if self.feed is None:
            self.feed = self.batches()
        while self.steps < last:
            self.micro_step(*next(self.feed))

    def batches(self) -> Iterator[Any]:
        """(ids, labels), from where the loop's own counter stands."""
        from accelerate import skip_first_batches

        o, per_epoch = self.o, len(self.loader)
        epoch, skip = divmod(self.steps * (o["per_step"] or o["accumulation"]), per_epoch)
        while True:
            self.loader.set_epoch(epoch)
            yield from skip_first_batches(self.loader, skip) if skip and o["skip"] else self.loader
            epoch, skip = epoch + 1, 0

    def micro_step(self, ids: torch.Tensor, labels: torch.Tensor) -> None:
        o = self.o
        with self.accelerator.accumulate(self.model) if o["accumulate"] else contextlib.nullcontext():
            loss = self.loss(self.model(ids), labels)
            self.accelerator.backward(loss)
            if self.accelerator.sync_gradients:
                if o["clip"]:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), o["clip"])
                self.by_hand(self.model)
                if (hook := self.hook_at.get(self.steps)) is not None:
                    hook(self)
            if o["zero_early"]:
                self.optimizer.zero_grad()
            self.optimizer.step()
            for _ in range(o["steps_of_scheduler"]):
                self.scheduler.step()
            self.optimizer.zero_grad()
            self.decay_by_hand(self.model)
        if self.accelerator.sync_gradients:
            self.steps += 1
            self.rows.append(float(loss.detach()))

    def save(self) -> Path:
        path = self.folder / "checkpoints" / f"step_{self.steps}"
        self.accelerator.save_state(str(path))
        return path

    def load(self, path: Path) -> None:
        self.accelerator.load_state(str(path))
        self.steps = SAVED_AT

    def finish(self) -> None:
        """Complete the manifests, as the end of the process does."""
        if self.run is not None:
            self.accelerator.chronicle.sealer.finish()
            self.accelerator.chronicle.data.finish()


FORMS: dict[str, type[Script]] = {"torch": TorchScript, "accelerate": AccelerateScript}

"""A modern recipe beside the bit transformer, as one plain script: `python -m bit_transformer.modern --steps 600`.

RoPE, QK-norm, RMSNorm without parameters, relu², no biases, zero-initialised outputs, warm-up / stable / decay, Muon for the
matrices and AdamW for embedding and head. It reads the same text, mixture and windows as the bit transformer, as bytes or
(`--symbols bits`) as bits with parity. One process; the guard is its only tie to chronicle: two optimizers and two schedulers
behind `attach`, the data position compared at every resume.

A study launches it like any stranger's script (`docs/studies.md`): everything that differs between launches is an option.
Shapes: B batch, T positions, D channels, H heads, E channels a head, V symbols.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import chronicle
from bit_transformer.data.bits import encode_bytes
from bit_transformer.data.corpora import read_corpus
from bit_transformer.data.loaders import StepDataset, open_stores, plan_data
from bit_transformer.errors import BadRecipe, TrainerError, print_error
from bit_transformer.training.schedule import ScheduleConfig, plan_schedule, with_rewarms
from chronicle.data import Segments
from chronicle.errors import ChronicleError

__all__ = ["Modern", "ModernConfig", "build_optimizers", "main"]

SOURCES = {"code": 7, "reference": 3}
SYMBOLS = {"bytes": 256, "bits": 2}
BASE_WIDTH = 64  # the LRs are given for this width, and scaled from it
EVAL_BATCH = 64
STRETCH, SCORED = 12, 8  # bytes of the probe for what context is worth
PROBED = (0, 3)  # stretches given


@dataclass(frozen=True, slots=True, kw_only=True)
class ModernConfig:
    """Shape of the model; `vocab` is 256 (bytes) or 2 (bits). A head has 32 channels, or 16 where the width is below 64."""

    width: int = 96
    layers: int = 3
    vocab: int = 256

    def __post_init__(self) -> None:
        if self.width < 32 or self.width % self.head_width:
            raise BadRecipe(f"width is {self.width}, expected a multiple of {self.head_width} from 32 on")
        if self.layers < 1 or self.vocab not in SYMBOLS.values():
            raise BadRecipe(f"layers is {self.layers}, vocab {self.vocab}: expected 1 or more, and 2 or 256")

    @property
    def head_width(self) -> int:
        """Channels of one head."""
        return 32 if self.width >= 64 else 16

    @property
    def num_parameters(self) -> int:
        """12 D² a layer, embedding and head of V rows each."""
        return 12 * self.width**2 * self.layers + 2 * self.vocab * self.width


def rotate(x_BHTE: Tensor) -> Tensor:
    """Rotary positions: pairs (e, e + E/2) turned by position × 10000^(−2e/E)."""
    half = x_BHTE.shape[-1] // 2
    rates = 10_000.0 ** -(torch.arange(half, device=x_BHTE.device, dtype=torch.float32) / half)
    angles_TE = torch.outer(torch.arange(x_BHTE.shape[2], device=x_BHTE.device, dtype=torch.float32), rates)
    cos, sin = angles_TE.cos().to(x_BHTE.dtype), angles_TE.sin().to(x_BHTE.dtype)
    one, other = x_BHTE.chunk(2, dim=-1)
    return torch.cat([one * cos - other * sin, one * sin + other * cos], dim=-1)


def rms_norm(x: Tensor) -> Tensor:
    """RMSNorm without parameters."""
    return F.rms_norm(x, x.shape[-1:])


class Block(nn.Module):
    """Attention with rotary positions and normed queries and keys, then relu²; both read the norm of the stream."""

    def __init__(self, config: ModernConfig) -> None:
        super().__init__()
        width, self.num_heads = config.width, config.width // config.head_width
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        for linear in (self.qkv, self.up):
            nn.init.uniform_(linear.weight, -math.sqrt(3 / width), math.sqrt(3 / width))
        for linear in (self.out, self.down):
            nn.init.zeros_(linear.weight)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Same shape out."""
        parts = self.qkv(rms_norm(x_BTD)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        y_BHTE = F.scaled_dot_product_attention(rotate(rms_norm(q)), rotate(rms_norm(k)), v, is_causal=True)
        x_BTD = x_BTD + self.out(y_BHTE.transpose(1, 2).flatten(2))
        y_BTD: Tensor = x_BTD + self.down(F.relu(self.up(rms_norm(x_BTD))).square())
        return y_BTD


class Modern(nn.Module):
    """Symbols (B, T) to float32 logits (B, T, V) of the next ones."""

    def __init__(self, config: ModernConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, symbols_BT: Tensor) -> Tensor:
        """Causal: a logit depends on its own and earlier symbols."""
        x_BTD = rms_norm(self.embedding(symbols_BT))
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV: Tensor = self.head(rms_norm(x_BTD)).float()
        return logits_BTV


def next_losses(model: nn.Module, symbols_BT: Tensor) -> Tensor:
    """Nats of every symbol but the first of a window, (B, T − 1)."""
    logits_BTV = model(symbols_BT[:, :-1])
    return F.cross_entropy(logits_BTV.flatten(0, 1), symbols_BT[:, 1:].flatten(), reduction="none").view(len(symbols_BT), -1)


def build_optimizers(model: Modern, *, matrix_lr: float, table_lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks, AdamW for embedding and head.

    LRs are those of width 64. Muon's update has a fixed norm whatever the width, so its LR stays; the embedding's stays, and
    the head's falls as 1/width (muP), because its input has more channels that move together.
    """
    matrices = list(model.blocks.parameters())
    tables = [{"params": [model.embedding.weight], "lr": table_lr},
              {"params": [model.head.weight], "lr": table_lr * BASE_WIDTH / model.config.width}]  # fmt: skip
    return [torch.optim.Muon(matrices, lr=matrix_lr, weight_decay=0.0),
            torch.optim.AdamW(tables, lr=table_lr, betas=(0.9, 0.95), weight_decay=0.0)]  # fmt: skip


@torch.no_grad()
def held_out_bits(model: nn.Module, texts: dict[str, Tensor], vocab: int) -> dict[str, float]:
    """Bits per byte of held-out windows (N, window) by source, and their `mixture`.

    The first symbol of a window is predicted by nothing and counts as evenly distributed.
    """
    device, found = next(model.parameters()).device, {}
    for name, windows_NW in texts.items():
        bits = len(windows_NW) * math.log2(vocab)
        for symbols_BT in torch.split(as_symbols(windows_NW, vocab), EVAL_BATCH):
            bits += float(next_losses(model, symbols_BT.to(device)).double().sum()) / math.log(2)
        found[name] = bits / windows_NW.numel()
    return {**found, "mixture": sum(found[name] * weight for name, weight in SOURCES.items()) / sum(SOURCES.values())}


def as_symbols(windows_NW: Tensor, vocab: int) -> Tensor:
    """Bytes as they are, or nine bits a byte."""
    return windows_NW.long() if vocab == SYMBOLS["bytes"] else encode_bytes(windows_NW).long()


def held_out_windows(window_bytes: int, num_bytes: int) -> dict[str, Tensor]:
    """Evenly spaced held-out windows (N, window_bytes) of every source, `num_bytes` of each or all there are."""
    found = {}
    for name in SOURCES:
        text = read_corpus(name).held_out
        whole = torch.frombuffer(bytearray(text[: len(text) // window_bytes * window_bytes]), dtype=torch.uint8)
        windows_NW = whole.view(-1, window_bytes)
        found[name] = windows_NW[:: max(1, windows_NW.numel() // num_bytes)]
    return found


@torch.no_grad()
def probe_bpb(model: nn.Module, texts: dict[str, Tensor], vocab: int, stretches: int) -> float:
    """Bits per byte of the last `SCORED` bytes of each held-out window after `stretches` of the same text, mixture weights.

    A stretch is `STRETCH` bytes: with 0 the model is given only the stretch that holds the scored bytes.
    """
    device, total, per_byte = next(model.parameters()).device, 0.0, 1 if vocab == SYMBOLS["bytes"] else 9
    for name, windows_NW in texts.items():
        bits = 0.0
        for symbols_BT in torch.split(as_symbols(windows_NW[:, -STRETCH * (stretches + 1) :], vocab), EVAL_BATCH):
            bits += float(next_losses(model, symbols_BT.to(device))[:, -SCORED * per_byte :].double().sum()) / math.log(2)
        total += bits / (len(windows_NW) * SCORED) * SOURCES[name]
    return total / sum(SOURCES.values())


def parse_mixture(text: str) -> dict[str, int]:
    """`code=3,reference=7` as weights of the sources."""
    try:
        weights = {name: int(weight) for name, _, weight in (part.partition("=") for part in text.split(","))}
    except ValueError:
        weights = {}
    if set(weights) != set(SOURCES) or min(weights.values()) < 1:
        usual = ",".join(f"{name}={weight}" for name, weight in SOURCES.items())
        raise BadRecipe(f"--mixture is `{text}`, expected weights from 1 such as `{usual}`")
    return weights


def parse_positions(text: str) -> list[range]:
    """`0:100,0:100` as ranges of the data plan, read one after the other."""
    try:
        pairs = [tuple(int(number) for number in part.split(":")) for part in text.split(",")]
        parts = [range(first, last) for first, last in pairs]
    except ValueError:
        raise BadRecipe(f"--data is `{text}`, expected positions such as `0:100` or `0:100,0:100`") from None
    if not all(len(part) and part.start >= 0 for part in parts):
        raise BadRecipe(f"--data is `{text}`, expected rising positions from 0")
    return parts


class OtherOrder(StepDataset):
    """The samples of each part of positions in another order, each at a place of its source: the mixture of a batch stays."""

    def reorder(self, parts: Sequence[range], order: int) -> OtherOrder:
        """Return this data set with the samples of every part in the order of that number."""
        self.moved: dict[int, Any] = {}
        for part in parts:
            ids = np.stack([super(OtherOrder, self)._ids(step) for step in part])
            flat = ids.reshape(-1, 2).copy()
            draw = np.random.default_rng([self.plan.seed, order, part.start])
            for source in np.unique(flat[:, 0]):
                places = np.flatnonzero(flat[:, 0] == source)
                flat[places] = flat[draw.permutation(places)]
            self.moved |= zip(part, flat.reshape(ids.shape), strict=True)
        return self

    def _ids(self, step: int) -> Any:
        return self.moved[step] if step in self.moved else super()._ids(step)


def positions_from(first: int, parts: Sequence[range]) -> Iterator[int]:
    """The position in the plan of each step: those of `--data`, else the step itself, counted on from there."""
    last = first
    for part in parts:
        yield from part
        last = part.stop
    while True:
        yield last
        last += 1


def length_of(number: float, steps: int) -> int:
    """A number of steps, or below 1 a share of the schedule, rounded."""
    return round(number * steps) if number < 1 else int(number)


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options; sizes and LRs are those of the benchmark's table."""
    parser = argparse.ArgumentParser(prog="python -m bit_transformer.modern", allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=600, help="length of the schedule")
    parser.add_argument("--stop-at", type=int, help="save and end this launch after that step")
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--symbols", choices=SYMBOLS, default="bytes")
    parser.add_argument("--window", type=int, default=256, help="bytes of a window")
    parser.add_argument("--batch", type=int, default=8, help="windows of a step")
    parser.add_argument("--lr", type=float, default=0.02, help="of Muon; AdamW's is --table-lr")
    parser.add_argument("--table-lr", type=float, default=0.01)
    parser.add_argument("--lr-scale", type=float, default=1.0, help="multiplies every LR")
    parser.add_argument("--rewarm", type=float, default=0, help="warm the LR up again over so many steps after the resume; "
                        "this and the next two: below 1 a share of --steps")
    parser.add_argument("--idle", type=float, default=0, help="an LR of 0 for so many steps after the resume")
    parser.add_argument("--mixture-steps", type=float, default=0, help="read --mixture for so many steps after the resume")
    parser.add_argument("--mixture", default="", help="weights of the sources, such as code=3,reference=7")
    parser.add_argument("--fresh-schedule", type=int, default=0, help="1: the LR schedule begins again at the resume")
    parser.add_argument("--probe", type=int, default=0, help="1: measure at the end what context is worth (eval/context-0, -3)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the order of the data")
    parser.add_argument("--data", default="", help="positions of the data plan to read, such as 100:200,100:200")
    parser.add_argument("--order", type=int, default=0, help="from 1 on: another order of the samples of each part of --data")
    parser.add_argument("--checkpoints", type=Path, default=Path(os.environ.get("CHRONICLE_CHECKPOINTS", "checkpoints")))
    parser.add_argument("--resume", type=Path, help="checkpoint to go on from")
    parser.add_argument("--save-every", type=int, default=200)
    parser.add_argument("--eval-every", type=int, default=200)
    parser.add_argument("--eval-bytes", type=int, default=65536, help="held-out bytes of each source")
    parser.add_argument("--device", default="cpu")
    return parser.parse_args(argv)


def train(o: argparse.Namespace) -> dict[str, float]:
    """Train to `--stop-at` or the end; return the last held-out bits per byte."""
    device = torch.device(o.device)
    if device.type == "cuda":
        torch.use_deterministic_algorithms(True)  # a study asks an exact restart for equal bits
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.manual_seed(o.seed)
    vocab = SYMBOLS[o.symbols]
    model = Modern(ModernConfig(width=o.width, layers=o.layers, vocab=vocab)).to(device)
    optimizers = build_optimizers(model, matrix_lr=o.lr * o.lr_scale, table_lr=o.table_lr * o.lr_scale)
    step, rewarms, origin, idle_until = 0, list[tuple[int, int]](), 0, 0
    wsd = ScheduleConfig(shape="wsd", warmup_steps=min(20, o.steps // 10), total_steps=o.steps,
                         decay_steps=o.steps * 2 // 5, final_fraction=0.02)  # fmt: skip
    planned = with_rewarms(plan_schedule(wsd), lambda: rewarms)

    def factor(at: int) -> float:
        return 0.0 if at < idle_until else planned(at - origin)

    schedulers = [torch.optim.lr_scheduler.LambdaLR(one, factor) for one in optimizers]
    stores = open_stores(SOURCES, o.window, data_dir=None)
    plan = plan_data(stores, SOURCES, batch_size=o.batch, seed=o.seed)
    parts = parse_positions(o.data) if o.data else []
    dataset: StepDataset = StepDataset(plan, Segments(), stores, rank=0, world_size=1, as_bytes=vocab == 256)
    if o.order:
        ordered = OtherOrder(plan, Segments(), stores, rank=0, world_size=1, as_bytes=vocab == 256)
        dataset = ordered.reorder(parts, o.order)
    other = dataset
    if o.mixture:
        weights = parse_mixture(o.mixture)
        mixed = plan_data(stores, weights, batch_size=o.batch, seed=o.seed)
        other = StepDataset(mixed, Segments(), stores, rank=0, world_size=1, as_bytes=vocab == 256)
    texts = held_out_windows(o.window, o.eval_bytes)
    chronicle.attach(None, model, optimizers, schedulers, step=lambda: step, data_state=lambda: {"step": step})

    if o.resume is not None:
        saved: Any = torch.load(o.resume, map_location=device, weights_only=False)
        model.load_state_dict(saved["model"])
        for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        for scheduler, state in zip(schedulers, saved["schedulers"], strict=True):
            scheduler.load_state_dict(state)
        step = saved["step"]
        origin, idle_until = step if o.fresh_schedule else 0, step + length_of(o.idle, o.steps)
        if o.rewarm:
            rewarms.append((step - origin, length_of(o.rewarm, o.steps)))
        if o.rewarm or o.idle or o.fresh_schedule:
            for one in schedulers:
                rates = [base * factor(step) for base in one.base_lrs]
                one._last_lr = rates
                for group, rate in zip(one.optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate

    found: dict[str, float] = {}
    positions, last = positions_from(step, parts), min(o.stop_at or o.steps, o.steps)
    other_until = step + length_of(o.mixture_steps, o.steps)
    while step < last:
        batch = (other if step < other_until else dataset)[next(positions)]
        symbols_BT = batch.bits_BT.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = next_losses(model, symbols_BT).mean()
        torch.autograd.backward(loss)
        values = {"loss": loss.item(), "lr": optimizers[0].param_groups[0]["lr"],
                  "grad_norm": float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)),
                  "data_digest": int(batch.digest[:13], 16)}  # fmt: skip
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
        model.zero_grad(set_to_none=True)
        step += 1
        if step == last or step % o.eval_every == 0:
            found = held_out_bits(model, texts, vocab)
            values |= {f"eval/{name}": bpb for name, bpb in found.items()}
            if o.probe and step == last:
                values |= {f"eval/context-{k}": probe_bpb(model, texts, vocab, k) for k in PROBED}
            print(f"step {step} loss {values['loss']:.4f} held-out bits per byte {found['mixture']:.4f}", flush=True)
        chronicle.log(step, **values)
        if step == last or step % o.save_every == 0:
            o.checkpoints.mkdir(parents=True, exist_ok=True)
            state = {"model": model.state_dict(), "optimizers": [one.state_dict() for one in optimizers],
                     "schedulers": [one.state_dict() for one in schedulers], "step": step}  # fmt: skip
            torch.save(state, o.checkpoints / f"step-{step}.pt")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line; return the exit code. Known errors are one sentence."""
    try:
        train(parse_options(argv))
    except (TrainerError, ChronicleError) as problem:
        print_error(problem)
        return getattr(problem, "exit_code", 1)
    return 0


if __name__ == "__main__":
    sys.exit(main())

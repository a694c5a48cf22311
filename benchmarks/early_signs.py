"""Early signs: how long before the loss each number from inside a model moves, on causes that are injected.

    python -m benchmarks.early_signs [--seeds 10] [--first 200] [--steps 1000] [--healthy] [--json FILE | --again FILE]

A small transformer (two layers, 32 wide, the bytes of this repository's pages) is trained for 1,000 steps on the CPU, once
healthy and once for each cause, which begins at step 350. LR, its decay, weight decay, warm-up, heads and initialisation vary.

    lr        the LR doubles every 60 to 150 steps and never stops: a warm-up without an end
    low       attention in low precision: the row sums of its backward pass are rounded one way, as in a bf16 flash attention,
              3 to 8 times as strongly as the sums are large, so that a thousand steps are enough
    router    the balancing term of four experts has the wrong sign, or is off and the router's own LR is 100 times as large

The lead is counted from the measurement at which a launch would name the channel (`chronicle.resume.signs.Judge`) to the first
event, of any tier, of the detector on the loss alone; where it says nothing, to the end of the run, which is a lower bound.
Beside it stands the moment at which the loss can be told from its healthy twin (same seed and batches; mean of 50 steps 5 %
higher), which nobody has in a real run. Healthy steps are those of the twins. Kinds of causes: arXiv 2606.28116.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chronicle.resume.signs import RULES, EarlySigns, SignJudge, SignRule
from rollback.detect import Detector

AT, EVERY, SYMBOLS, LENGTH, ROWS, LAYERS, EXPERTS = 350, 10, 128, 32, 4, 2, 4
CAUSES = ("lr", "low", "router")
TWIN = {"lr": "dense", "low": "dense", "router": "experts"}
LEVEL, WINDOW = 1.05, 50  # when the loss is told from its twin


# --- The model


class LowPrecision(torch.autograd.Function):
    """Causal attention whose backward pass rounds the row sums of `dO * O` one way, by a share `bias` of each term."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: float) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.bias = bias
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v = ctx.saved_tensors
        scale = 1.0 / math.sqrt(q.shape[-1])
        hidden = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1)
        p = (q @ k.transpose(-1, -2) * scale).masked_fill(hidden, -torch.inf).softmax(-1)
        out = p @ v
        sums = (grad * (out - ctx.bias * out.abs())).sum(-1, keepdim=True)
        ds = p * (grad @ v.transpose(-1, -2) - sums) * scale
        return ds @ k, ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ grad, None


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.qkv, self.out, self.heads, self.bias = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width), heads, 0.0
        self.looks, self.logit, self.entropy = False, 0.0, 1.0

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        if self.looks:
            self.look(q.detach()[:2], k.detach()[:2])
        if self.bias:
            seen = LowPrecision.apply(q, k, v, self.bias)
        else:
            seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(seen.transpose(1, 2).reshape(b, t, d))


    def look(self, q: Tensor, k: Tensor) -> None:
        """The largest |logit|, and the entropy of the sharpest head over that of an even one."""
        visible = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril()
        logits = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        entropy = torch.special.entr(logits.masked_fill(~visible, -torch.inf).softmax(-1)).sum(-1)[..., 1:]
        self.logit = float(logits[..., visible].abs().max())
        self.entropy = float((entropy / torch.arange(2, q.shape[-2] + 1).log()).mean((0, 2)).min())


def plain_mlp(width: int, factor: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, factor * width), nn.GELU(), nn.Linear(factor * width, width))


class Experts(nn.Module):
    """Four experts, one for each token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, EXPERTS, bias=False)
        self.experts = nn.ModuleList(plain_mlp(width, 2) for _ in range(EXPERTS))
        self.balance = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        shares = self.router(flat).softmax(-1)
        top, chosen = shares.max(-1)
        loads = F.one_hot(chosen, EXPERTS).float()
        self.balance = EXPERTS * (loads.mean(0) * shares.mean(0)).sum()
        each = torch.stack([expert(flat) for expert in self.experts], 1)
        return ((each * loads[..., None]).sum(1) * top[:, None]).view_as(x)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, *, experts: bool) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = Experts(width) if experts else plain_mlp(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        return x + self.mlp(self.between(x))


class Model(nn.Module):
    def __init__(self, width: int, heads: int, *, experts: bool, small: bool) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(SYMBOLS, width), nn.Parameter(0.02 * torch.randn(LENGTH, width))
        self.blocks = nn.ModuleList(Block(width, heads, experts=experts) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, SYMBOLS, bias=False)
        if small:
            nn.init.normal_(self.symbols.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        x = self.symbols(x) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# --- One training


@dataclass(frozen=True, slots=True)
class Run:
    """One training: `cause` is one of CAUSES, or `dense` or `experts` for a healthy one."""

    cause: str
    seed: int
    steps: int


def play(run: Run) -> dict[str, Any]:
    """Train once; returns the losses, the first event on the loss, and each channel as (step, value)."""
    torch.set_num_threads(1)
    dice = random.Random(run.seed)
    lr, decay, warm_up = dice.choice((2e-3, 4e-3)), dice.choice((0.0, 0.1)), dice.choice((0, 50, 100))
    width, heads, small = 32, dice.choice((2, 4)), dice.random() < 0.5
    doubling, bias = dice.uniform(60, 150), dice.uniform(3.0, 8.0)
    kind, falls = dice.choice(("sign", "lr")), dice.random() < 0.5
    torch.manual_seed(run.seed)
    model = Model(width, heads, experts=run.cause in ("router", "experts"), small=small)
    routers = [p for name, p in model.named_parameters() if "router" in name]
    others = [p for name, p in model.named_parameters() if "router" not in name]
    groups = [{"params": others}, *([{"params": routers}] if routers else [])]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), weight_decay=decay)
    channels: dict[str, list[tuple[int, float]]] = {}
    signs = EarlySigns(lambda step, values: keep(channels, step, values), EVERY, raise_it)
    signs.attach([model], [optimizer])
    draw, text, detector = torch.Generator().manual_seed(run.seed), pages(), Detector()
    losses, alarm, balance = [], None, 0.02
    for step in range(1, run.steps + 1):
        factor = min(1.0, step / warm_up) if warm_up else 1.0
        factor *= 0.55 + 0.45 * math.cos(math.pi * step / run.steps) if falls else 1.0
        if step >= AT and run.cause == "lr":
            factor *= 2.0 ** ((step - AT) / doubling)
        for index, group in enumerate(optimizer.param_groups):
            group["lr"] = lr * factor * (100.0 if index and step >= AT and run.cause == "router" and kind == "lr" else 1.0)
        if step == AT and run.cause == "low":
            for block in model.blocks:
                block.attention.bias = bias
        if step == AT and run.cause == "router":
            balance = -0.1 if kind == "sign" else 0.0
        at = torch.randint(0, len(text) - LENGTH - 1, (ROWS,), generator=draw)
        batch = torch.stack([text[i : i + LENGTH + 1] for i in at])
        for block in model.blocks:
            block.attention.looks = step % EVERY == 0
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        extra = sum(block.mlp.balance for block in model.blocks) * balance if routers else 0.0
        optimizer.zero_grad()
        (loss + extra).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if detector.feed(step, {"loss": losses[-1]}) and alarm is None and step >= AT:
            alarm = step
        if step % EVERY == 0:
            keep(channels, step, moments(optimizer))
            keep(channels, step, {"lr": max(group["lr"] for group in optimizer.param_groups[:1])})
            keep(channels, step, {"attn_logit_max": max(block.attention.logit for block in model.blocks),
                                  "attn_entropy": min(block.attention.entropy for block in model.blocks)})
    return {"cause": run.cause, "seed": run.seed, "losses": losses, "alarm": alarm, "channels": channels}


def keep(channels: dict[str, list[tuple[int, float]]], step: int, values: Mapping[str, float]) -> None:
    for name, value in values.items():
        channels.setdefault(name, []).append((step, value))


def raise_it(problem: Exception) -> None:
    raise problem


def pages() -> Tensor:
    """The repository's own pages as bytes."""
    found = sorted(Path(__file__).resolve().parents[1].glob("docs/*.md"))
    return torch.tensor(list(b"".join(page.read_bytes() for page in found))).clamp(max=SYMBOLS - 1)


def moments(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    states = [optimizer.state[p] for group in optimizer.param_groups for p in group["params"] if p in optimizer.state]
    first = math.sqrt(sum(float(state["exp_avg"].square().sum()) for state in states))
    second = math.sqrt(sum(float(state["exp_avg_sq"].sum()) for state in states))
    return {"moment_1": first, "moment_2": second, "moment_ratio": first / max(second, 1e-30)}

# --- What each channel is worth


TRIED = (
    *RULES,
    SignRule("attn_logit_max", 3.0, ""),
    SignRule("attn_entropy", 0.5, ""),
    SignRule("moment_1", 2.0, ""),
    SignRule("moment_2", 2.0, ""),
    SignRule("moment_ratio", 2.0, ""),
    SignRule("moment_ratio", 0.5, ""),
)


def first_sign(run: Mapping[str, Any], rule: SignRule) -> int | None:
    """The step at which the launch's own judge names this channel, once the fault is there; at any step in a healthy run."""
    channel, lrs = run["channels"].get(rule.channel, []), dict(run["channels"]["lr"])
    judge = SignJudge((rule,))
    broken = [step for step, value in channel if judge.see(step, {rule.channel: value}, lrs.get(step, 0.0))]
    return broken[0] if broken else None


def seen_beside(run: Mapping[str, Any], twin: Mapping[str, Any]) -> int | None:
    """The step at which the mean of 50 losses lies 5 % above the twin's."""
    pairs = list(zip(run["losses"], twin["losses"], strict=True))
    for end in range(AT + WINDOW, len(pairs) + 1):
        ours, theirs = (statistics.fmean(pair[i] for pair in pairs[end - WINDOW : end]) for i in (0, 1))
        if not ours < LEVEL * theirs:
            return end
    return None


def report(runs: Sequence[Mapping[str, Any]], steps: int) -> list[str]:
    """The table: for each channel and cause the runs with a sign, and its lead; false signs in healthy runs."""
    by = {(run["cause"], run["seed"]): run for run in runs}
    healthy = [run for run in runs if run["cause"] in TWIN.values()]
    points = sum(len(run["losses"]) for run in healthy)
    rows = []
    for cause in CAUSES:
        hurt = [run for run in runs if run["cause"] == cause]
        if not hurt:
            continue
        beside = [seen_beside(run, by[TWIN[cause], run["seed"]]) for run in hurt]
        alarms = [run["alarm"] for run in hurt]
        rows.append(f"{cause}: {len(hurt)} runs; the detector names the loss in {sum(a is not None for a in alarms)}, at step "
                    f"{middle(alarms, steps)}; beside its twin it shows in {sum(b is not None for b in beside)}, at step "
                    f"{middle(beside, steps)}; the fault begins at {AT}")
        for rule in TRIED:
            signs = [first_sign(run, rule) for run in hurt]
            if not any(signs):
                continue
            leads = [(alarm or steps) - sign if sign is not None else None for sign, alarm in zip(signs, alarms, strict=True)]
            twins = [(at or steps) - sign if sign is not None else None for sign, at in zip(signs, beside, strict=True)]
            known = [(alarm - sign) if alarm is not None and sign is not None else None
                     for sign, alarm in zip(signs, alarms, strict=True)]
            rows.append(
                f"  {rule.channel:15} × {rule.factor:<4g} signs {sum(s is not None for s in signs):2}/{len(hurt)}, median lead "
                f"over the detector {median_of(leads)} (where it said something: {median_of(known)}), over the twin "
                f"{median_of(twins)}"
            )
    rows.append(f"healthy: {len(healthy)} runs, {points:,} steps")
    for rule in TRIED:
        false = sum(first_sign(run, rule) is not None for run in healthy)
        rows.append(f"  {rule.channel:15} × {rule.factor:<4g} {false} false, {1e4 * false / max(points, 1):.2f} per 10k steps")
    return rows


def middle(found: Sequence[int | None], steps: int) -> str:
    """The median, with what was never seen put at the end."""
    return f"{statistics.median([steps if at is None else at for at in found]):.0f} in the median"


def median_of(leads: Sequence[int | None]) -> str:
    """The median over all runs in which there is something to compare; a missing sign counts as none at all."""
    known = [lead for lead in leads if lead is not None]
    return f"{statistics.median(known):.0f} of {len(known)}" if known else "-"


def main() -> None:
    """Play all runs and print what each channel is worth."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=200)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--healthy", action="store_true", help="the healthy runs alone: how many signs are false")
    parser.add_argument("--json", type=Path, help="write what was measured, one run a line")
    parser.add_argument("--again", type=Path, help="do not train: judge what --json wrote")
    given = parser.parse_args()
    if given.again:
        runs = [json.loads(line) for line in given.again.read_text().splitlines()]
    else:
        seeds = range(given.first, given.first + given.seeds)
        causes = (*(() if given.healthy else CAUSES), *dict.fromkeys(TWIN.values()))
        wanted = [Run(cause, seed, given.steps) for seed in seeds for cause in causes]
        runs = []
        with ProcessPoolExecutor(given.processes) as pool:
            for run in pool.map(play, wanted):
                runs.append(run)
                named = [f"{rule.channel} at {at}" for rule in RULES if (at := first_sign(run, rule))]
                print(f"{len(runs)} of {len(wanted)}: {run['cause']} {run['seed']}: {named or 'no sign'}", flush=True)
    if given.json:
        given.json.write_text("".join(json.dumps(run) + "\n" for run in runs))
    print("\n".join(report(runs, given.steps)))


if __name__ == "__main__":
    main()

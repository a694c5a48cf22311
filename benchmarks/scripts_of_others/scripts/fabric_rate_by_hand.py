"""Fabric in the manner of LitGPT: the LR of every iteration is computed and written by hand, state is one dictionary."""

import math
from pathlib import Path

import torch
from lightning.fabric import Fabric
from torch import nn

MAX_ITERS, SAVE, ACCUMULATE, WARMUP, LR = 60, 8, 2, 5, 3e-3
out = Path("out/pretrain")


class Model(nn.Module):
    def __init__(self, vocab=50, width=16):
        super().__init__()
        self.wte = nn.Embedding(vocab, width)
        layer = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.h = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.lm_head = nn.Linear(width, vocab, bias=False)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.lm_head(self.h(self.wte(ids), mask=mask, is_causal=True))


def get_lr(it):
    if it < WARMUP:
        return LR * (it + 1) / WARMUP
    ratio = (it - WARMUP) / (MAX_ITERS // ACCUMULATE - WARMUP)
    return LR * 0.1 + 0.5 * (1 + math.cos(math.pi * min(ratio, 1))) * LR * 0.9


def main(fabric):
    fabric.seed_everything(42)
    with fabric.init_module(empty_init=False):
        model = Model()
    model = fabric.setup(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1, betas=(0.9, 0.95))
    optimizer = fabric.setup_optimizers(optimizer)
    tokens = torch.randint(50, (160, 17), generator=torch.Generator().manual_seed(3))
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(tokens, batch_size=4, shuffle=True))
    state = {"model": model, "optimizer": optimizer, "iter_num": 0, "step_count": 0}
    resume = max(out.glob("step-*/lit_model.pth"), key=lambda p: int(p.parent.name.split("-")[1]), default=None)
    if resume:
        fabric.load(resume, state)
    train_iterator = iter(loader)
    while state["iter_num"] < MAX_ITERS:
        lr = get_lr(state["step_count"])
        for group in optimizer.param_groups:
            group["lr"] = lr
        try:
            batch = next(train_iterator)
        except StopIteration:
            train_iterator = iter(loader)
            batch = next(train_iterator)
        state["iter_num"] += 1
        accumulating = state["iter_num"] % ACCUMULATE != 0
        with fabric.no_backward_sync(model, enabled=accumulating):
            logits = model(batch[:, :-1])
            loss = nn.functional.cross_entropy(logits.reshape(-1, 50), batch[:, 1:].reshape(-1))
            fabric.backward(loss / ACCUMULATE)
        if not accumulating:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            state["step_count"] += 1
        if not accumulating and state["iter_num"] % SAVE == 0:
            path = out / f"step-{state['iter_num']:06d}" / "lit_model.pth"
            path.parent.mkdir(parents=True, exist_ok=True)
            fabric.save(path, state)


fabric = Fabric(accelerator="cpu", devices=1)
fabric.launch()
main(fabric)

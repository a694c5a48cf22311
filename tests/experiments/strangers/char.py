"""A character model in one file, in the shape of nanoGPT's train.py: its own flags, its own checkpoint, lines it prints.

It imports nothing of chronicle. `ckpt.pt` files lie in a directory a step; the order of batches is a function of seed and step.
"""

import os
import sys

import torch
from torch.nn import functional as F

out_dir, init_from, seed, max_iters, lr_iters, save_interval, batch_size, learning_rate, warm_again, positions = (
    "out", "scratch", 1337, 40, 60, 20, 8, 1e-2, 0, "")  # fmt: skip
fresh_moments = 0
for word in sys.argv[1:]:
    key, _, value = word.removeprefix("--").partition("=")
    assert key in globals(), key
    globals()[key] = type(globals()[key])(value)

torch.manual_seed(seed)
text = torch.randint(0, 8, (4096,), generator=torch.Generator().manual_seed(0)).cumsum(0) % 16
train_data, val_data = text[:3584], text[3584:]


def get_batch(data: torch.Tensor, position: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    at = torch.randint(0, len(data) - 9, (size,), generator=torch.Generator().manual_seed(seed * 100_000 + position))
    rows = torch.stack([data[i : i + 9] for i in at.tolist()])
    return rows[:, :-1], rows[:, 1:]


model = torch.nn.Sequential(torch.nn.Embedding(16, 24), torch.nn.Linear(24, 48), torch.nn.GELU(), torch.nn.Linear(48, 16))
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
iter_num = first_iter = 0
if init_from != "scratch":
    checkpoint = torch.load(os.path.join(init_from, "ckpt.pt"))
    model.load_state_dict(checkpoint["model"])
    if not fresh_moments:
        optimizer.load_state_dict(checkpoint["optimizer"])
    iter_num = first_iter = checkpoint["iter_num"]
order = [at for part in positions.split(",") if part for at in range(*map(int, part.split(":")))]

while iter_num < max_iters:
    lr = learning_rate * min(1.0, (lr_iters - iter_num) / 20)
    if warm_again:
        lr *= min(1.0, (iter_num - first_iter + 1) / warm_again)
    for group in optimizer.param_groups:
        group["lr"] = lr
    x, y = get_batch(train_data, order[iter_num - first_iter] if order else iter_num, batch_size)
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    iter_num += 1
    print(f"iter {iter_num}: loss {loss.item():.6f}, lr {lr:.6g}")
    if iter_num % save_interval == 0 or iter_num == max_iters:
        with torch.no_grad():
            x, y = get_batch(val_data, 0, 256)
            print(f"step {iter_num}: val loss {F.cross_entropy(model(x).flatten(0, 1), y.flatten()).item():.6f}", flush=True)
        directory = os.path.join(out_dir, f"iter-{iter_num}")
        os.makedirs(directory, exist_ok=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": iter_num}
        torch.save(state, os.path.join(directory, "ckpt.pt"))

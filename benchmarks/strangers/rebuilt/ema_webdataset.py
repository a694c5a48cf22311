"""Tar shards by webdataset and an exponential average of the weights; a resume starts the shards anew."""

import io
import os
import tarfile

import numpy
import torch
import webdataset
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import chronicle

if not os.path.exists("shards"):
    os.makedirs("shards")
    for shard in range(3):
        with tarfile.open(f"shards/{shard:03}.tar", "w") as tar:
            for row in range(16):
                file = io.BytesIO()
                numpy.save(file, numpy.random.default_rng(shard * 16 + row).normal(size=8).astype("float32"))
                entry = tarfile.TarInfo(f"{shard:03}{row:03}.npy")
                entry.size = file.tell()
                file.seek(0)
                tar.addfile(entry, file)

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
chronicle.attach("strangers", model, optimizer, scheduler, averages={"ema": average})  # the line
step = 0
if os.path.exists("last.pt"):
    saved = torch.load("last.pt", weights_only=False)
    model.load_state_dict(saved["model"])
    average.load_state_dict(saved["ema"])
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    step = saved["step"]
shards = [f"shards/{shard:03}.tar" for shard in range(3)]
rows = webdataset.WebDataset(shards, shardshuffle=3, resampled=True).shuffle(12).decode().to_tuple("npy").batched(6)
for (batch,) in webdataset.WebLoader(rows, batch_size=None):
    x = torch.as_tensor(numpy.stack(batch))
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    average.update_parameters(model)
    step += 1
    if step % 5 == 0:
        state = {"model": model.state_dict(), "ema": average.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "scheduler": scheduler.state_dict(), "step": step}, "last.pt")
    if step == 36:
        break

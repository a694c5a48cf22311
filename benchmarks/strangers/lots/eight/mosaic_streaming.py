"""Shards of mosaicml-streaming, whose loader's state is in the checkpoint; a model with two heads."""

import os

import numpy as np
import torch
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from torch import nn

import chronicle

if not os.path.exists("shards"):
    rng = np.random.default_rng(0)
    with MDSWriter(out="shards", columns={"x": "ndarray:float32:8", "y": "int"}, size_limit=4096) as out:
        for i in range(160):
            out.write({"x": rng.normal(size=8).astype("float32"), "y": i % 3})
torch.manual_seed(0)
dataset = StreamingDataset(local="shards", shuffle=True, shuffle_seed=7, batch_size=8)
loader = StreamingDataLoader(dataset, batch_size=8, num_workers=0)
model = nn.ModuleDict({"body": nn.Linear(8, 16), "one": nn.Linear(16, 3), "two": nn.Linear(16, 1)})
optimizer = torch.optim.RAdam(model.parameters(), lr=2e-3)
chronicle.attach("strangers", model, optimizer)  # the line
step = 0
if os.path.exists("stream.pt"):
    saved = torch.load("stream.pt", weights_only=False)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    loader.load_state_dict(saved["loader"])
    step = saved["step"]
while step < 36:
    for batch in loader:
        h = model["body"](batch["x"]).relu()
        loss = nn.functional.cross_entropy(model["one"](h), batch["y"]) + 0.1 * model["two"](h).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 4 == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}
            torch.save({**state, "step": step}, "stream.pt")

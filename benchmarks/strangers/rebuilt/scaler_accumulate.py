"""Mixed precision as the AMP page shows it: a GradScaler, unscale and clip, one step for four micro-batches."""

import os

import torch

import chronicle

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=40)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5)
run = chronicle.attach("strangers", model, optimizer, scheduler, scaler=scaler)  # the line
x = torch.randn(64, 8)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, drop_last=True)
step = epoch = 0
if os.path.exists("amp.pt"):
    saved = torch.load("amp.pt", weights_only=False)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    scaler.load_state_dict(saved["scaler"])
    step, epoch = saved["step"], saved["epoch"]
while step < 36:
    for micro, (inputs, targets) in enumerate(loader):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = torch.nn.functional.mse_loss(model(inputs), targets) / 4
        scaler.scale(loss).backward()
        if micro % 4 == 3:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
    epoch += 1
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    torch.save({**state, "scaler": scaler.state_dict(), "step": step, "epoch": epoch}, "amp.pt")

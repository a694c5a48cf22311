"""A compiled model with gradient accumulation; the rate is cut by a plateau of the validation loss."""

import os

import torch

import chronicle

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
compiled = torch.compile(model, backend="eager", fullgraph=True)
optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
x = torch.randn(96, 8)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.mean(1, keepdim=True)), batch_size=4, shuffle=True)
chronicle.attach("strangers", compiled, optimizer, scheduler, data=loader, accumulation=4)  # the line
first = 0
if os.path.exists("compiled.pt"):
    saved = torch.load("compiled.pt", weights_only=False)
    compiled.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    first = saved["epoch"]
for epoch in range(first, 7):
    compiled.train()
    for number, (inputs, targets) in enumerate(loader):
        (torch.nn.functional.mse_loss(compiled(inputs), targets) / 4).backward()
        if (number + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
    compiled.eval()
    with torch.no_grad():
        scheduler.step(torch.nn.functional.mse_loss(compiled(x), x.mean(1, keepdim=True)).item())
    state = {"model": compiled.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    torch.save({**state, "epoch": epoch + 1}, "compiled.pt")

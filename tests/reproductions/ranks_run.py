"""A small data-parallel run for the reproductions: `ranks_run.py FOLDER guarded|bare save|load [drift]`."""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

folder, guarded, load, drift = Path(sys.argv[1]), sys.argv[2] == "guarded", sys.argv[3] == "load", "drift" in sys.argv
set_seed(0)
accelerator = Accelerator(cpu=True)
if guarded:
    import chronicle

    chronicle.guard(accelerator, run_dir=folder / "logs" / "run")
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = torch.utils.data.TensorDataset(torch.randn(64, 8))
model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=2, shuffle=True))
if load:
    accelerator.load_state(str(folder / "ck" / "step-8"))
for step, (batch,) in enumerate(loader, 1):
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    if drift and step == 3 and accelerator.process_index == 1:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
    if step == 8:
        break
if not load:
    accelerator.save_state(str(folder / "ck" / "step-8"))
weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
spread = accelerator.gather(weights[None])
if accelerator.is_main_process:
    print("trained; largest difference between ranks", float((spread[0] - spread[-1]).abs().max()))

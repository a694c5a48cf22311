"""PEFT's AdaLoRA in a plain loop: ranks are pruned while it trains; the whole state is saved."""

import os

import torch
from peft import AdaLoraConfig, get_peft_model
from torch import nn

import chronicle

torch.manual_seed(83)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(12, 32)
        self.outer = nn.Linear(32, 4)

    def forward(self, x):
        return self.outer(self.inner(x).relu())


TOTAL = 40
config = AdaLoraConfig(init_r=6, target_r=3, tinit=4, tfinal=8, deltaT=2, total_step=TOTAL, target_modules=["inner", "outer"])
model = get_peft_model(Net(), config)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=4e-3)
scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, TOTAL, 1.5)
guarded = chronicle.attach("strangers", model, optimizer, scheduler)  # the line
step = 0
if os.path.exists("ada.pt"):
    state = torch.load("ada.pt", weights_only=False)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    step = state["step"]
while step < TOTAL:
    x = torch.randn(16, 12, generator=torch.Generator().manual_seed(step))
    loss = nn.functional.cross_entropy(model(x), (x[:, :4]).argmax(1))
    loss.backward()
    optimizer.step()
    scheduler.step()
    model.base_model.update_and_allocate(step)
    optimizer.zero_grad()
    step += 1
    if step % 4 == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(), "step": step}, "ada.pt")

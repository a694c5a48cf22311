"""A K-FAC preconditioner of the script: hooks collect factors, gradients are rewritten before SGD steps."""

import os

import torch
from torch import nn

import chronicle

torch.manual_seed(101)
model = nn.Sequential(nn.Linear(9, 28), nn.Tanh(), nn.Linear(28, 3))


class Kfac:
    def __init__(self, model):
        self.layers = [m for m in model if isinstance(m, nn.Linear)]
        self.a = [torch.eye(m.in_features) for m in self.layers]
        self.g = [torch.eye(m.out_features) for m in self.layers]
        for i, layer in enumerate(self.layers):
            layer.register_forward_pre_hook(lambda _, inputs, i=i: self._mix(self.a, i, inputs[0].detach()))
            layer.register_full_backward_hook(lambda _, __, outputs, i=i: self._mix(self.g, i, outputs[0].detach()))

    @staticmethod
    def _mix(held, i, rows):
        held[i] = 0.95 * held[i] + 0.05 * rows.T @ rows / len(rows)

    def precondition(self):
        for layer, a, g in zip(self.layers, self.a, self.g, strict=True):
            eye = 0.1
            layer.weight.grad = torch.linalg.solve(g + eye * torch.eye(len(g)), layer.weight.grad) @ torch.linalg.inv(a + eye * torch.eye(len(a)))

    def state_dict(self):
        return {"a": self.a, "g": self.g}

    def load_state_dict(self, state):
        self.a, self.g = state["a"], state["g"]


kfac = Kfac(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True)
warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1, 10)
guarded = chronicle.attach("strangers", model, optimizer, warm, objects={"kfac": kfac})  # the line
step = 0
if os.path.exists("kfac.pt"):
    state = torch.load("kfac.pt", weights_only=False)
    for name, thing in {"model": model, "optimizer": optimizer, "warm": warm, "kfac": kfac}.items():
        thing.load_state_dict(state[name])
    step = state["step"]
while step < 45:
    x = torch.randn(32, 9, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
    kfac.precondition()
    optimizer.step()
    warm.step()
    step += 1
    if step % 5 == 0:
        things = {"model": model, "optimizer": optimizer, "warm": warm, "kfac": kfac}
        torch.save({**{name: thing.state_dict() for name, thing in things.items()}, "step": step}, "kfac.pt")

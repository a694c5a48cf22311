"""Sine waves predicted in float64 by LBFGS, whose step calls a closure many times."""

import os

import torch

import chronicle

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)


class Sequence(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.out = torch.nn.LSTMCell(1, 9), torch.nn.LSTMCell(9, 9), torch.nn.Linear(9, 1)

    def forward(self, x):
        state_1 = state_2 = (torch.zeros(len(x), 9), torch.zeros(len(x), 9))
        out = []
        for value in x.split(1, dim=1):
            state_1 = self.first(value, state_1)
            state_2 = self.second(state_1[0], state_2)
            out.append(self.out(state_2[0]))
        return torch.cat(out, dim=1)


phase = torch.arange(6.0).unsqueeze(1)
waves = torch.sin((torch.arange(24.0) + phase * 4) / 5)
model = Sequence()
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.8, max_iter=5)
chronicle.attach("strangers", model, optimizer)  # the line
first = 0
if os.path.exists("wave.pt"):
    saved = torch.load("wave.pt", weights_only=False)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["step"]
for step in range(first, 24):

    def closure():
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(waves[:, :-1]), waves[:, 1:])
        loss.backward()
        return loss

    optimizer.step(closure)
    if step % 3 == 2:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}, "wave.pt")

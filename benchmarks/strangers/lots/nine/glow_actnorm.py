"""A flow of normflows: ActNorm layers that set themselves by the first batch, weights checked for NaN before each step."""

import os

import normflows as nf
import torch

import chronicle

torch.manual_seed(10)
layers = []
for i in range(3):
    layers += [nf.flows.AffineCouplingBlock(nf.nets.MLP([1, 16, 2], init_zeros=True)), nf.flows.Permute(2, mode="swap"), nf.flows.ActNorm(2)]
model = nf.NormalizingFlow(nf.distributions.base.DiagGaussian(2), layers)
optimizer = torch.optim.Adamax(model.parameters(), lr=2e-3, weight_decay=1e-5)
chronicle.attach("strangers", model, optimizer)  # the line
target = nf.distributions.TwoMoons()
it = 0
if os.path.exists("flow.pt"):
    saved = torch.load("flow.pt")
    model.load_state_dict(saved["model"]), optimizer.load_state_dict(saved["optimizer"])
    it = saved["it"]
while it < 40:
    optimizer.zero_grad()
    x = torch.randn(32, 2) * 0.4 + torch.randint(0, 2, (32, 1))
    loss = model.forward_kld(x)
    if ~(torch.isnan(loss) | torch.isinf(loss)):
        loss.backward()
        optimizer.step()
    it += 1
    if it % 5 == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "it": it}, "flow.pt")

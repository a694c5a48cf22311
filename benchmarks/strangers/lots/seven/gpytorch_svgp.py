"""A sparse Gaussian process by gpytorch: natural gradients for the variational part, Adam for the hyperparameters, float64."""

import os

import gpytorch
import torch
from torch.utils.data import DataLoader, TensorDataset

import chronicle

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
x = torch.rand(120, 2)
y = torch.sin(6 * x[:, 0]) + 0.1 * torch.randn(120)


class Process(gpytorch.models.ApproximateGP):
    def __init__(self, points):
        family = gpytorch.variational.NaturalVariationalDistribution(len(points))
        super().__init__(gpytorch.variational.VariationalStrategy(self, points, family, learn_inducing_locations=True))
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=2))

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


model, likelihood = Process(x[:16].clone()), gpytorch.likelihoods.GaussianLikelihood()
natural = gpytorch.optim.NGD(model.variational_parameters(), num_data=120, lr=0.1)
hyper = torch.optim.Adam([{"params": model.hyperparameters()}, {"params": likelihood.parameters()}], lr=0.01)
mll = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=120)
whole = torch.nn.ModuleList([model, likelihood])
chronicle.attach("strangers", whole, [natural, hyper])  # the line
first = 0
if os.path.exists("svgp.pt"):
    saved = torch.load("svgp.pt")
    model.load_state_dict(saved["model"])
    likelihood.load_state_dict(saved["likelihood"])
    natural.load_state_dict(saved["natural"])
    hyper.load_state_dict(saved["hyper"])
    first = saved["epoch"] + 1
model.train(), likelihood.train()
loader = DataLoader(TensorDataset(x, y), batch_size=24, shuffle=True)
for epoch in range(first, 6):
    for inputs, targets in loader:
        natural.zero_grad()
        hyper.zero_grad()
        loss = -mll(model(inputs), targets)
        loss.backward()
        natural.step()
        hyper.step()
    state = {"model": model.state_dict(), "likelihood": likelihood.state_dict(), "epoch": epoch}
    torch.save({**state, "natural": natural.state_dict(), "hyper": hyper.state_dict()}, "svgp.pt")

"""DeepXDE: the heat equation by collocation points, its own loop, its checkpoint callback and `restore`."""

import glob
import os

os.environ["DDE_BACKEND"] = "pytorch"

import deepxde as dde
import numpy as np
import torch

import chronicle

dde.config.set_random_seed(37)


def residual(x, u):
    return dde.grad.jacobian(u, x, i=0, j=1) - 0.1 * dde.grad.hessian(u, x, i=0, j=0)


space = dde.geometry.GeometryXTime(dde.geometry.Interval(-1, 1), dde.geometry.TimeDomain(0, 1))
edge = dde.icbc.DirichletBC(space, lambda x: 0, lambda _, on: on)
start = dde.icbc.IC(space, lambda x: np.sin(np.pi * x[:, 0:1]), lambda _, on: on)
data = dde.data.TimePDE(space, residual, [edge, start], num_domain=40, num_boundary=8, num_initial=16)
model = dde.Model(data, dde.nn.FNN([2, 16, 16, 1], "tanh", "Glorot normal"))
model.compile("adam", lr=1e-3, loss_weights=[1, 1, 10])
chronicle.attach("strangers", model.net, model.opt)  # the line
done = 0
found = sorted(glob.glob("heat/*.pt"), key=os.path.getmtime)
if found:
    model.restore(found[-1])
    done = int(found[-1].split("/")[1].split("-")[0]) + int(found[-1].split("-")[-1][:-3])
os.makedirs("heat", exist_ok=True)
saver = dde.callbacks.ModelCheckpoint(f"heat/{done}", save_better_only=False, period=4)
resampler = dde.callbacks.PDEPointResampler(period=5)
model.train(iterations=45 - done, display_every=4, callbacks=[saver, resampler], verbose=0)
assert torch.is_tensor(next(model.net.parameters()))

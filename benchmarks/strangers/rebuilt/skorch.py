"""skorch: the optimizer is made inside fit(), a callback loads the last checkpoint before training begins."""

from pathlib import Path

import numpy
import torch
from skorch import NeuralNetRegressor
from skorch.callbacks import Callback, Checkpoint, LoadInitState

import chronicle


class Guarded(Callback):
    """The lines: the guard needs the objects before the state is loaded, so it stands before LoadInitState."""

    def on_train_begin(self, net, **_):
        chronicle.attach("strangers", net.module_, net.optimizer_)


torch.manual_seed(0)
module = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
x = numpy.random.default_rng(0).normal(size=(64, 4)).astype("float32")
checkpoint = Checkpoint(dirname="skorch", monitor=None)
done = Path("skorch/epochs").stat().st_size if Path("skorch/epochs").exists() else 0


class CountEpochs(Callback):
    def on_epoch_end(self, net, **_):
        with open("skorch/epochs", "a") as file:
            file.write(".")


net = NeuralNetRegressor(
    module,
    optimizer=torch.optim.Adam,
    lr=1e-2,
    batch_size=8,
    max_epochs=max(8 - done, 1),
    train_split=None,
    iterator_train__shuffle=True,
    callbacks=[("guarded", Guarded()), ("load", LoadInitState(checkpoint)), ("save", checkpoint), ("count", CountEpochs())],
    verbose=0,
)
net.fit(x, x.sum(1, keepdims=True))

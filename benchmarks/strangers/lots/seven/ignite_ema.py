"""Ignite: supervised trainer with accumulation, EMAHandler, a rate by pieces, a deterministic engine, best and last checkpoints."""

import glob
import os

import torch
from ignite.engine import DeterministicEngine, Events, create_supervised_evaluator, supervised_training_step
from ignite.handlers import Checkpoint, DiskSaver, EMAHandler, PiecewiseLinear, global_step_from_engine
from ignite.metrics import Loss
from ignite.utils import manual_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import chronicle

manual_seed(9)
x = torch.randn(72, 6, generator=torch.Generator().manual_seed(0))
rows = TensorDataset(x, x.sum(1, keepdim=True))
loader = DataLoader(rows, batch_size=6, shuffle=True)
model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Dropout(0.1), nn.Linear(24, 1))
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.5)
step = supervised_training_step(model, optimizer, nn.functional.mse_loss, gradient_accumulation_steps=2)
trainer = DeterministicEngine(step)
scheduler = PiecewiseLinear(optimizer, "lr", milestones_values=[(0, 1e-4), (20, 3e-3), (84, 0.0)])
trainer.add_event_handler(Events.ITERATION_STARTED, scheduler)
ema = EMAHandler(model, momentum=0.02)
ema.attach(trainer, name="ema_momentum", event=Events.ITERATION_COMPLETED(every=2))
chronicle.attach("strangers", model, optimizer)  # the line
evaluator = create_supervised_evaluator(ema.ema_model, metrics={"mse": Loss(nn.functional.mse_loss)})
to_save = {"model": model, "optimizer": optimizer, "trainer": trainer, "scheduler": scheduler, "ema": ema.ema_model}
last = Checkpoint(to_save, DiskSaver("kept", create_dir=True, require_empty=False), filename_prefix="last", n_saved=2)
best = Checkpoint(
    {"model": ema.ema_model},
    DiskSaver("kept", create_dir=True, require_empty=False),
    filename_prefix="best",
    score_function=lambda engine: -engine.state.metrics["mse"],
    global_step_transform=global_step_from_engine(trainer),
)
trainer.add_event_handler(Events.EPOCH_COMPLETED, last)
evaluator.add_event_handler(Events.COMPLETED, best)
trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(DataLoader(rows, batch_size=24)))
saved = sorted(glob.glob("kept/last_checkpoint_*.pt"), key=lambda p: int(p.rsplit("_", 1)[1][:-3]))
if saved and os.path.exists(saved[-1]):
    Checkpoint.load_objects(to_load=to_save, checkpoint=torch.load(saved[-1], map_location="cpu", weights_only=False))
trainer.run(loader, max_epochs=7)

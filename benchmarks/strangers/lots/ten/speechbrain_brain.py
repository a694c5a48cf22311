"""SpeechBrain's Brain with its Checkpointer: recovery inside `fit`, an epoch counter, annealing by the validation."""

import speechbrain as sb
import torch
from speechbrain.nnet.schedulers import NewBobScheduler
from speechbrain.utils.checkpoints import Checkpointer
from speechbrain.utils.epoch_loop import EpochCounter
from torch import nn

import chronicle

torch.manual_seed(9)


class Brain(sb.Brain):
    def init_optimizers(self):
        super().init_optimizers()
        self.guard = chronicle.attach("strangers", self.modules, self.optimizer)  # the line

    def compute_forward(self, batch, stage):
        return self.modules.model(batch[0])

    def compute_objectives(self, predictions, batch, stage):
        return nn.functional.mse_loss(predictions, batch[1])

    def on_stage_end(self, stage, loss, epoch):
        if stage == sb.Stage.VALID:
            _, new = self.hparams.annealing(loss)
            sb.nnet.schedulers.update_learning_rate(self.optimizer, new)
            self.checkpointer.save_and_keep_only(meta={"loss": loss}, min_keys=["loss"])


model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 4))
counter, annealing = EpochCounter(limit=9), NewBobScheduler(initial_value=0.01, patient=0)
checkpointer = Checkpointer("save", recoverables={"model": model, "counter": counter, "annealing": annealing})
brain = Brain(
    {"model": model}, lambda parameters: torch.optim.Adadelta(parameters, lr=0.01), {"annealing": annealing},
    run_opts={"device": "cpu", "ckpt_interval_minutes": -1, "noprogressbar": True}, checkpointer=checkpointer,
)
x = torch.randn(48, 16, generator=torch.Generator().manual_seed(1))
rows = torch.utils.data.TensorDataset(x, x[:, :4].abs())
brain.fit(counter, rows, rows, train_loader_kwargs={"batch_size": 8, "shuffle": True}, valid_loader_kwargs={"batch_size": 16})

"""HF Trainer whose optimizer is made by the script: Adafactor with relative steps, so that its rate is None."""

import torch
from transformers import Adafactor, Trainer, TrainingArguments
from transformers.optimization import AdafactorSchedule
from transformers.trainer_utils import get_last_checkpoint

from chronicle.resume.transformers import ChronicleCallback


class Regression(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))

    def forward(self, x, labels):
        out = self.layer(x)
        return {"loss": (out - labels).square().mean(), "logits": out}


class OwnOptimizer(Trainer):
    def create_optimizer_and_scheduler(self, num_training_steps):
        self.optimizer = Adafactor(self.model.parameters(), scale_parameter=True, relative_step=True, warmup_init=True, lr=None)
        self.lr_scheduler = AdafactorSchedule(self.optimizer)


generator = torch.Generator().manual_seed(0)
rows = [{"x": torch.randn(5, generator=generator), "labels": torch.ones(1)} for _ in range(64)]
arguments = TrainingArguments(
    "out", max_steps=30, save_steps=3, per_device_train_batch_size=4, report_to=[], use_cpu=True, disable_tqdm=True, seed=7
)
torch.manual_seed(0)
trainer = OwnOptimizer(Regression(), arguments, train_dataset=rows, callbacks=[ChronicleCallback("strangers")])  # the line
trainer.train(resume_from_checkpoint=get_last_checkpoint("out"))

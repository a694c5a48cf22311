"""HF Trainer with a loss of its own, evaluation in between and the best model at the end."""

import torch
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from chronicle.resume.transformers import ChronicleCallback


class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = torch.nn.Linear(6, 16), torch.nn.Linear(16, 3)

    def forward(self, x, labels=None):
        return {"logits": self.head(torch.relu(self.body(x)))}


class WeightedTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = torch.nn.functional.cross_entropy(outputs["logits"], labels, weight=torch.tensor([1.0, 2.0, 3.0]))
        return (loss, outputs) if return_outputs else loss


generator = torch.Generator().manual_seed(0)
rows = [{"x": torch.randn(6, generator=generator), "labels": n % 3} for n in range(96)]
arguments = TrainingArguments(
    "out",
    max_steps=36,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    save_steps=4,
    eval_strategy="steps",
    eval_steps=4,
    save_total_limit=2,
    load_best_model_at_end=True,
    warmup_steps=4,
    learning_rate=1e-2,
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
    remove_unused_columns=False,
    label_names=["labels"],
)
callback = ChronicleCallback("strangers")  # the line
torch.manual_seed(0)
trainer = WeightedTrainer(Classifier(), arguments, train_dataset=rows, eval_dataset=rows[:16], callbacks=[callback])
trainer.train(resume_from_checkpoint=get_last_checkpoint("out"))

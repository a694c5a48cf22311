"""Accelerate over a streamed data set with a shuffle buffer, found again by skip_first_batches."""

from pathlib import Path

import datasets
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

import chronicle

set_seed(0)
accelerator = chronicle.guard(Accelerator(cpu=True, gradient_accumulation_steps=2), run_dir="strangers")  # the line
rows = datasets.Dataset.from_dict({"a": [[float(n)] for n in range(96)]})
stream = rows.to_iterable_dataset(num_shards=2).shuffle(seed=42, buffer_size=16).with_format("torch")
loader = torch.utils.data.DataLoader(stream, batch_size=4)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=60)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
batches_done = 0
if Path("ck/newest").exists():
    batches_done = int(Path("ck/newest").read_text())
    accelerator.load_state(f"ck/batch-{batches_done}")
for epoch in range(batches_done // 24, 3):
    stream.set_epoch(epoch)
    left_out = batches_done % 24 if epoch == batches_done // 24 else 0
    for batch in accelerator.skip_first_batches(loader, left_out) if left_out else loader:
        with accelerator.accumulate(model):
            accelerator.backward((model(batch["a"]) / 96).square().mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        batches_done += 1
        if batches_done % 10 == 0:
            accelerator.save_state(f"ck/batch-{batches_done}")
            Path("ck/newest").write_text(str(batches_done))
accelerator.end_training()

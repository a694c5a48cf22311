"""A trainer class with callbacks and an endless iterator, as minGPT has it; the loader's state is in the snapshot."""

import os
from collections import defaultdict

import torch
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

import chronicle


class Characters(Dataset):
    def __init__(self, text, block):
        letters = sorted(set(text))
        self.ids, self.block, self.vocabulary = [letters.index(c) for c in text], block, len(letters)

    def __len__(self):
        return len(self.ids) - self.block

    def __getitem__(self, index):
        piece = torch.tensor(self.ids[index : index + self.block + 1])
        return piece[:-1], piece[1:]


class Trainer:
    def __init__(self, model, dataset):
        self.model, self.iteration, self.callbacks = model, 0, defaultdict(list)
        decay = [p for p in model.parameters() if p.ndim >= 2]
        plain = [p for p in model.parameters() if p.ndim < 2]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95))
        self.loader = StatefulDataLoader(dataset, batch_size=8, shuffle=True, num_workers=0)

    def snapshot(self):
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save({**state, "loader": self.loader.state_dict(), "iteration": self.iteration}, "snapshot.pt")

    def restore(self):
        state = torch.load("snapshot.pt", weights_only=False)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.loader.load_state_dict(state["loader"])
        self.iteration = state["iteration"]

    def run(self, last):
        batches = iter(self.loader)
        while self.iteration < last:
            try:
                x, y = next(batches)
            except StopIteration:
                batches = iter(self.loader)
                x, y = next(batches)
            loss = torch.nn.functional.cross_entropy(self.model(x).flatten(0, 1), y.flatten())
            self.model.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.iteration += 1
            for callback in self.callbacks["on_batch_end"]:
                callback(self)


torch.manual_seed(3407)
data = Characters("to be or not to be that is the question " * 3, 8)
trainer = Trainer(torch.nn.Sequential(torch.nn.Embedding(data.vocabulary, 16), torch.nn.Linear(16, data.vocabulary)), data)
chronicle.attach("strangers", trainer.model, trainer.optimizer)  # the line
trainer.callbacks["on_batch_end"].append(lambda t: t.iteration % 5 == 0 and t.snapshot())
if os.path.exists("snapshot.pt"):
    trainer.restore()
trainer.run(40)

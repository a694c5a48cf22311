"""A recommender: SparseAdam for the embeddings, Adagrad for the rest, each with a schedule, negatives drawn per batch."""

import pathlib

import torch
from torch import nn

import chronicle

torch.manual_seed(31)


class DLRM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList([nn.EmbeddingBag(40, 8, mode="sum", sparse=True) for _ in range(3)])
        self.bottom = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 8))
        self.top = nn.Sequential(nn.Linear(8 + 6, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense, ids):
        parts = torch.stack([self.bottom(dense), *(t(ids[:, i : i + 1]) for i, t in enumerate(self.tables))], 1)
        products = torch.bmm(parts, parts.transpose(1, 2))
        i, j = torch.tril_indices(4, 4, -1)
        return self.top(torch.cat([parts[:, 0], products[:, i, j]], 1)).squeeze(1)


model = DLRM()
sparse = torch.optim.SparseAdam(model.tables.parameters(), lr=1e-2)
dense = torch.optim.Adagrad([*model.bottom.parameters(), *model.top.parameters()], lr=2e-2)
schedulers = [
    torch.optim.lr_scheduler.StepLR(sparse, 10, 0.5),
    torch.optim.lr_scheduler.CosineAnnealingLR(dense, 40),
]
chronicle.attach("strangers", model, [sparse, dense], schedulers)  # the line
generator = torch.Generator().manual_seed(100)
rows = (torch.rand(160, 5, generator=generator), torch.randint(40, (160, 3), generator=generator))
clicks = (rows[0].sum(1) > 2.5).float()
step, file = 0, pathlib.Path("dlrm.pt")
if file.exists():
    state = torch.load(file)
    model.load_state_dict(state["model"])
    for part, saved in zip([sparse, dense, *schedulers], state["parts"], strict=True):
        part.load_state_dict(saved)
    step = state["step"]
while step < 36:
    pick = torch.randperm(160, generator=torch.Generator().manual_seed(step))[:16]
    logits = model(rows[0][pick], rows[1][pick])
    loss = nn.functional.binary_cross_entropy_with_logits(logits, clicks[pick])
    sparse.zero_grad()
    dense.zero_grad()
    loss.backward()
    sparse.step()
    dense.step()
    for scheduler in schedulers:
        scheduler.step()
    step += 1
    if step % 6 == 0:
        parts = [part.state_dict() for part in (sparse, dense, *schedulers)]
        torch.save({"model": model.state_dict(), "parts": parts, "step": step}, file)

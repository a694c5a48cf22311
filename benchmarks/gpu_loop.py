"""A plain training loop for `gpu_evidence`: AdamW, bf16 autocast, saved by `torch.save`, by DCP, or sharded by FSDP2.

    python -m benchmarks.gpu_loop --steps 12 --stop-at 6 --checkpoints DIR --form dcp [--resume DIR/step-6] [--plant shift]

Dropout is off, so that the first gradient after a resume can be compared. `--plant shift` compares each token with itself
after the resume, a fault that no file shows.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

VOCABULARY = 256


def build(width: int, layers: int, device: str) -> Any:
    """A causal transformer without dropout."""
    import torch
    from torch import nn

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, width)
            one = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            self.blocks = nn.ModuleList([_copy(one) for _ in range(layers)])
            self.head = nn.Linear(width, VOCABULARY)

        def forward(self, x_BT: Any) -> Any:
            x_BTD = self.embedding(x_BT)
            mask_TT = nn.Transformer.generate_square_subsequent_mask(x_BT.shape[1], device=x_BT.device)
            for block in self.blocks:
                x_BTD = block(x_BTD, src_mask=mask_TT, is_causal=True)
            return self.head(x_BTD)

    def _copy(layer: Any) -> Any:
        import copy

        return copy.deepcopy(layer)

    torch.manual_seed(0)
    return Model().to(device)


def loss_of(model: Any, step: int, device: str, *, batch: int, length: int, shifted: bool = True) -> Any:
    """Next-token loss of the batch of this step, in bf16 autocast."""
    import torch

    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (batch, length + 1), generator=generator).to(device)
    labels = tokens[:, 1:] if shifted else tokens[:, :-1]
    with torch.autocast(device, dtype=torch.bfloat16):
        logits = model(tokens[:, :-1])
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def main(argv: Sequence[str] | None = None) -> int:
    """Train, save every sixth step, and end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--stop-at", type=int)
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--form", choices=("plain", "dcp", "fsdp2"), default="plain")
    parser.add_argument("--plant", choices=("none", "shift"), default="none")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(argv)

    import torch

    import chronicle

    torch.use_deterministic_algorithms(True)
    model = build(128, 2, options.device)
    if options.form == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
        torch.distributed.init_process_group("nccl" if options.device == "cuda" else "gloo")
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda at: 1 / (1 + 0.1 * at))
    chronicle.attach(None, model, optimizer, scheduler)
    first = load(options.resume, options.form, model, optimizer, scheduler) if options.resume else 0
    for step in range(first + 1, options.steps + 1):
        shifted = options.plant == "none" or not options.resume
        loss = loss_of(model, step, options.device, batch=4, length=32, shifted=shifted)
        torch.autograd.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        chronicle.log(step, loss=loss.item(), lr=scheduler.get_last_lr()[0])
        if step % 6 == 0:
            save(options.checkpoints / f"step-{step}", step, options.form, model, optimizer, scheduler)
        if step == options.stop_at:
            break
    if options.form == "fsdp2":
        torch.distributed.destroy_process_group()
    return 0


def save(path: Path, step: int, form: str, model: Any, optimizer: Any, scheduler: Any) -> None:
    """Write one checkpoint."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    path.parent.mkdir(parents=True, exist_ok=True)
    if form == "plain":
        path.mkdir()
        parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        torch.save({**parts, "step": step}, path / "state.pt")
        return
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": moments, "scheduler": scheduler.state_dict(), "step": step}, checkpoint_id=path)


def load(path: Path, form: str, model: Any, optimizer: Any, scheduler: Any) -> int:
    """Load one checkpoint; its step."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    if form == "plain":
        state = torch.load(path / "state.pt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        return int(state["step"])
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optim": moments, "scheduler": scheduler.state_dict(), "step": 0}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    scheduler.load_state_dict(state["scheduler"])
    return int(state["step"])


if __name__ == "__main__":
    raise SystemExit(main())

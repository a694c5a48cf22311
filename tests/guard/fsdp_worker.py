"""One rank of a plain torch loop under fully_shard, with torch's distributed checkpoints; arguments as `ranks_worker.py`."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import chronicle
from chronicle.launch.ranks import leave_group
from tests.guard.training import small_model

RUN_DIR, CHECKPOINT = Path(sys.argv[1]), Path(sys.argv[2])


class Loop:
    """One start of the script."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = small_model()
        fully_shard(self.model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.99)
        self.run = chronicle.attach(RUN_DIR, self.model, self.optimizer, self.scheduler)
        self.step = 0

    def train(self, num_steps: int) -> list[float]:
        losses = []
        for _ in range(num_steps):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(self.step))
            loss = (self.model(x) - x.sum(1, keepdim=True)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.step += 1
            losses.append(loss.item())
        return losses

    def save(self) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save(
            {"model": model, "optimizer": optimizer, "scheduler": self.scheduler.state_dict()}, checkpoint_id=CHECKPOINT
        )
        self.run.saved(CHECKPOINT)
        self.run.session.sealer.finish()

    def load(self, *, moments: bool = True) -> "Loop":
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": self.scheduler.state_dict()}
        dcp.load(state, checkpoint_id=CHECKPOINT)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.step = 6
        if not moments:
            for entry in self.optimizer.state.values():
                entry["exp_avg"].zero_()
        return self


def save() -> list[float]:
    loop = Loop(0)
    loop.train(6)
    loop.save()
    return loop.train(3)


def resume() -> list[float]:
    return Loop(1).load().train(3)


def wrong_weights_on_rank_1() -> list[float]:
    loop = Loop(1).load()
    if torch.distributed.get_rank() == 1:
        with torch.no_grad():
            next(loop.model.parameters()).to_local().add_(1)
    return loop.train(3)


def moments_left_out() -> list[float]:
    return Loop(1).load(moments=False).train(3)


def nothing_loaded() -> list[float]:
    return Loop(1).train(3)


def main() -> None:
    torch.distributed.init_process_group("gloo")
    acts = {act.__name__: act for act in (save, resume, wrong_weights_on_rank_1, moments_left_out, nothing_loaded)}
    for name in sys.argv[3:]:
        try:
            told: object = acts[name]()
        except chronicle.ResumeRefused as refusal:
            told = {"refused": refusal.code}
        line = json.dumps({"rank": torch.distributed.get_rank(), "act": name, "told": told}) + "\n"
        os.write(1, line.encode())
    leave_group()


if __name__ == "__main__":
    main()

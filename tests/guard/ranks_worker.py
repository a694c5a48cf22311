"""One rank of a gloo training, started by torchrun: `ranks_worker.py RUN_DIR CHECKPOINT ACT …`, acts in order.

Each act but the first is a launch of its own, in these processes: starting torch four times is what would take long.
"""

import json
import os
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed

from chronicle import ResumeRefused
from chronicle.launch.ranks import leave_group
from rollback.checkpoint.manifest import read_manifest, write_manifest
from tests.guard.training import Launch, start

RUN_DIR, CHECKPOINT = Path(sys.argv[1]), Path(sys.argv[2])


def save(rank: int) -> list[float]:
    launch = start(RUN_DIR)
    torch.manual_seed(100 + rank)
    launch.train(6)
    launch.save(CHECKPOINT)
    torch.distributed.barrier()
    return launch.train(3)


def save_and_go_on_with_decay(rank: int) -> list[float]:
    """The script changes memory itself, on every rank, right after its save."""
    launch = start(RUN_DIR)
    torch.manual_seed(100 + rank)
    launch.train(6)
    launch.save(CHECKPOINT)
    torch.distributed.barrier()
    return decayed(launch, 0.05)


def resume_with_decay(rank: int) -> list[float]:
    return decayed(resumed(), 0.05)


def resume_with_other_decay(rank: int) -> list[float]:
    return decayed(resumed(), 0.5)


def decayed(launch: Launch, decay: float) -> list[float]:
    for group in launch.optimizer.param_groups:
        group["weight_decay"] = decay
    return launch.train(3)


def save_on_the_main_process(rank: int) -> list[float]:
    launch = start(RUN_DIR)
    launch.train(6)
    if rank == 0:
        launch.save(CHECKPOINT)
    return launch.train(3)


def resume(rank: int) -> list[float]:
    return resumed().train(3)


def resume_with_other_weights_on_the_last_rank(rank: int) -> list[float]:
    launch = resumed()
    if rank == torch.distributed.get_world_size() - 1:
        with torch.no_grad():
            next(launch.model.parameters()).add_(1)
    return launch.train(3)


def resume_on_another_number_of_ranks(rank: int) -> list[float]:
    """The reason is given: everything that does not depend on the number of ranks is still compared."""
    launch = start(RUN_DIR, seed=1, accept_change={"world_size": "half of the nodes", "rng": "fewer ranks"})
    launch.accelerator.load_state(str(CHECKPOINT))
    return launch.train(3)


def resume_with_copied_generators(rank: int) -> list[float]:
    if rank == 0:  # as if the save itself had written rank 0's generators for every rank
        manifest = read_manifest(CHECKPOINT)
        assert manifest is not None
        shutil.copy(CHECKPOINT / "random_states_0.pkl", CHECKPOINT / "random_states_1.pkl")
        write_manifest(CHECKPOINT, step=6, memory=manifest.memory)
    torch.distributed.barrier()
    return resumed().train(3)


def resumed() -> Launch:
    launch = start(RUN_DIR, seed=1)
    launch.accelerator.load_state(str(CHECKPOINT))
    return launch


def main() -> None:
    acts = {
        act.__name__: act
        for act in (
            save,
            save_and_go_on_with_decay,
            resume_with_decay,
            resume_with_other_decay,
            save_on_the_main_process,
            resume,
            resume_with_other_weights_on_the_last_rank,
            resume_on_another_number_of_ranks,
            resume_with_copied_generators,
        )
    }
    rank = start(None).accelerator.process_index
    assert torch.distributed.get_world_size() == int(os.environ["WORLD_SIZE"]) > 1
    for name in sys.argv[3:]:
        if name == "uncaught":
            resume_with_other_weights_on_the_last_rank(rank)
        try:
            told: object = acts[name](rank)
        except ResumeRefused as refusal:
            told = {"refused": refusal.code}
        line = json.dumps({"rank": rank, "act": name, "told": told}) + "\n"
        os.write(1, line.encode())  # one write: ranks share this pipe, and torchrun's `-u` tears a print into two


if __name__ == "__main__":
    main()
    leave_group()

"""One rank: plays the two-rank causes named on the command line, one after another, in one process group.

`torchrun --nproc_per_node 2 -m benchmarks.planted_bugs.worker FOLDER guarded|bare RIG INDEX…`; results as JSON lines.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed

from benchmarks.planted_bugs.catalogue import causes, healthy_causes
from benchmarks.planted_bugs.play import play
from chronicle.launch.ranks import leave_group


def main() -> None:
    """Every rank plays every cause; rank 0 tells."""
    folder, guarded, rig, *indices = Path(sys.argv[1]), sys.argv[2] == "guarded", *sys.argv[3:]
    if rig == "zero":
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    else:
        torch.distributed.init_process_group("gloo")
    everything = (*causes(), *healthy_causes())
    rank = torch.distributed.get_rank()
    for index in map(int, indices):
        place = folder / f"{index}-{guarded}"
        result = play(everything[index], guarded=guarded, folder=place, rank=rank, barrier=torch.distributed.barrier)
        if rank == 0:
            print("RESULT " + result.to_line(), flush=True)
    torch.distributed.barrier()
    leave_group()


if __name__ == "__main__":
    main()

"""Plays causes on a process group of one rank (raw DeepSpeed), in a process of its own; arguments as for `worker`."""

import sys
from pathlib import Path

from benchmarks.planted_bugs.catalogue import causes, healthy_causes
from benchmarks.planted_bugs.play import play
from benchmarks.planted_bugs.rig_deepspeed import prepare_environment


def main() -> None:
    """One after another; results as JSON lines."""
    folder, guarded, _, *indices = Path(sys.argv[1]), sys.argv[2] == "guarded", *sys.argv[3:]
    prepare_environment()
    everything = (*causes(), *healthy_causes())
    for index in map(int, indices):
        result = play(everything[index], guarded=guarded, folder=folder / f"{index}-{guarded}")
        print("RESULT " + result.to_line(), flush=True)


if __name__ == "__main__":
    main()

"""`python -m benchmarks.replay PART`: prints the tables of `docs/replay.md`; all of them without a part."""

import argparse
import sys
from itertools import islice

from benchmarks.replay import accelerated, causes, cells, cost, hf_trainer, relaunch, shapes

LISTS = {
    "causes": causes.causes,
    "accelerated": accelerated.causes,
    "hf-trainer": hf_trainer.causes,
    "shapes": shapes.causes,
}
PARTS = ("cost", *LISTS, "cells", "relaunch")


def main() -> int:
    """Run what was asked for, everything by default."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay")
    parser.add_argument("part", nargs="?", choices=PARTS)
    parser.add_argument("--only", default="", help="causes whose name holds these words")
    parser.add_argument("--every", type=int, default=1, help="every n-th cause of a list, from its first on")
    parser.add_argument("--seconds", type=float, default=7200, help="after which no cell is begun")
    parser.add_argument("--seed", type=int, default=1, help="of the planted places")
    asked = parser.parse_args()
    if asked.part in (None, "cost"):
        cost.show()
    wrong = 0
    for name, planted in LISTS.items():
        if asked.part in (None, name):
            wrong += causes.show(islice(planted(), 0, None, asked.every), asked.only)
    wrong += cells.show(asked.only, asked.seconds, asked.seed) if asked.part in (None, "cells") else 0
    wrong += relaunch.show(asked.only) if asked.part in (None, "relaunch") else 0
    return wrong


if __name__ == "__main__":
    sys.exit(main())

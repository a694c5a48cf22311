"""`python -m benchmarks.replay PART`: prints the tables of `docs/replay.md`; all of them without a part."""

import argparse
import sys

from benchmarks.replay import accelerated, causes, cells, cost, fifth, fresh, futures, kills, searches, sixth, trainer

PARTS = (
    "cost", "causes", "accelerated", "trainer", "fresh", "fifth", "sixth", "cells", "kills", "bisects", "bisect-ranks",
    "futures",
)  # fmt: skip


def main() -> int:
    """Run what was asked for, everything by default."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay")
    parser.add_argument("part", nargs="?", choices=PARTS)
    parser.add_argument("--only", default="", help="causes whose name holds these words")
    parser.add_argument("--plays", type=int, default=50, help="bisects, kills, futures")
    parser.add_argument("--seconds", type=float, default=7200, help="after which no cell is begun")
    parser.add_argument("--seed", type=int, default=1, help="of the planted places")
    asked = parser.parse_args()
    if asked.part in (None, "cost"):
        cost.show()
    wrong = causes.show(causes.causes(), asked.only) if asked.part in (None, "causes") else 0
    wrong += causes.show(accelerated.causes(), asked.only) if asked.part in (None, "accelerated") else 0
    wrong += causes.show(trainer.causes(), asked.only) if asked.part in (None, "trainer") else 0
    wrong += causes.show(fresh.causes(), asked.only) if asked.part in (None, "fresh") else 0
    wrong += causes.show(fifth.causes(), asked.only) if asked.part in (None, "fifth") else 0
    wrong += causes.show(sixth.causes(), asked.only) if asked.part in (None, "sixth") else 0
    wrong += cells.show(asked.only, asked.seconds) if asked.part in (None, "cells") else 0
    wrong += kills.show(asked.plays, asked.seed) if asked.part in (None, "kills") else 0
    wrong += futures.show(asked.plays, asked.seed) if asked.part in (None, "futures") else 0
    wrong += searches.show(asked.plays, asked.seed, searches.RANKS) if asked.part == "bisect-ranks" else 0
    return wrong + (searches.show(asked.plays, asked.seed, searches.KINDS) if asked.part in (None, "bisects") else 0)


if __name__ == "__main__":
    sys.exit(main())

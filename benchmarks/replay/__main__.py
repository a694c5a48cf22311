"""`python -m benchmarks.replay PART`: prints the tables of `docs/replay.md`; all of them without a part."""

import argparse
import sys
from itertools import islice
from pathlib import Path

from benchmarks.replay import (
    abroad,
    accelerated,
    causes,
    cells,
    cost,
    eighteenth,
    eighth,
    eleventh,
    fifteenth,
    fifth,
    fourteenth,
    fresh,
    futures,
    kills,
    nineteenth,
    ninth,
    searches,
    seventeenth,
    seventh,
    sixteenth,
    sixth,
    tenth,
    thirteenth,
    trainer,
    twelfth,
    twentieth,
)

LISTS = {
    "causes": causes.causes,
    "accelerated": accelerated.causes,
    "trainer": trainer.causes,
    "fresh": fresh.causes,
    "fifth": fifth.causes,
    "sixth": sixth.causes,
    "seventh": seventh.causes,
    "eighth": eighth.causes,
    "ninth": ninth.causes,
    "tenth": tenth.causes,
    "eleventh": eleventh.causes,
    "twelfth": twelfth.causes,
    "thirteenth": thirteenth.causes,
    "fourteenth": fourteenth.causes,
    "fifteenth": fifteenth.causes,
    "sixteenth": sixteenth.causes,
    "seventeenth": seventeenth.causes,
    "eighteenth": eighteenth.causes,
    "nineteenth": nineteenth.causes,
    "twentieth": twentieth.causes,
}
PARTS = ("cost", *LISTS, "abroad", "cells", "kills", "bisects", "bisect-ranks", "futures")


def main() -> int:
    """Run what was asked for, everything by default."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay")
    parser.add_argument("part", nargs="?", choices=PARTS)
    parser.add_argument("--only", default="", help="causes whose name holds these words")
    parser.add_argument("--every", type=int, default=1, help="every n-th cause of a list, from its first on")
    parser.add_argument("--plays", type=int, default=50, help="bisects, kills, futures")
    parser.add_argument("--seconds", type=float, default=7200, help="after which no cell, no divergence is begun")
    parser.add_argument("--seed", type=int, default=1, help="of the planted places")
    parser.add_argument("--clones", type=Path, help="abroad: DIR/<owner>+<repository>/…, as for `benchmarks.strangers`")
    asked = parser.parse_args()
    if asked.part in (None, "cost"):
        cost.show()
    wrong = 0
    for name, planted in LISTS.items():
        if asked.part in (None, name):
            wrong += causes.show(islice(planted(), 0, None, asked.every), asked.only)
    wrong += abroad.show(asked.only, asked.clones) if asked.part == "abroad" else 0
    wrong += cells.show(asked.only, asked.seconds, asked.seed) if asked.part in (None, "cells") else 0
    wrong += kills.show(asked.plays, asked.seed) if asked.part in (None, "kills") else 0
    wrong += futures.show(asked.plays, asked.seed, asked.seconds) if asked.part in (None, "futures") else 0
    wrong += searches.show(asked.plays, asked.seed, searches.RANKS) if asked.part == "bisect-ranks" else 0
    return wrong + (searches.show(asked.plays, asked.seed, searches.KINDS) if asked.part in (None, "bisects") else 0)


if __name__ == "__main__":
    sys.exit(main())

"""`python -m benchmarks.replay [cost|causes] [--only WORDS]`: prints the tables of `docs/replay.md`."""

import argparse
import sys

from benchmarks.replay import causes, cost


def main() -> int:
    """Run what was asked for, everything by default."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay")
    parser.add_argument("part", nargs="?", choices=("cost", "causes"))
    parser.add_argument("--only", default="", help="causes whose name holds these words")
    asked = parser.parse_args()
    if asked.part in (None, "cost"):
        cost.show()
    return causes.show(asked.only) if asked.part in (None, "causes") else 0


if __name__ == "__main__":
    sys.exit(main())

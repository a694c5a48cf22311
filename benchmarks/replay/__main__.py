"""`python -m benchmarks.replay [cost]`: prints the tables of `docs/replay.md`."""

import argparse
import sys

from benchmarks.replay import cost


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay")
    parser.add_argument("part", nargs="?", choices=("cost",), default="cost")
    parser.parse_args()
    cost.show()
    return 0


if __name__ == "__main__":
    sys.exit(main())

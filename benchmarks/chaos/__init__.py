"""Planted faults in one long training with nobody at the keyboard: `python -m benchmarks.chaos`."""

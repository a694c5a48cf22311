"""The parts of a training run around the loop of `train.py`: state, schedule, ranks, resume, logs, preflight."""

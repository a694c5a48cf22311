"""The flight envelope measured: public silent bugs made small, healthy trainings of many kinds, and the cost of a step.

`python -m benchmarks.envelope` prints the three tables. The bugs are those that TrainCheck (OSDI '25, arXiv 2506.14813) was
evaluated with, rebuilt from their public descriptions; no code of theirs is used.
"""

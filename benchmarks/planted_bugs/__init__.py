"""Planted resume bugs: every catalogued cause that can be planted on a CPU, played against real frameworks.

`python -m benchmarks.planted_bugs` prints, per cause and adapter, whether the guard stops it before the first step,
when it acts, or only the log shows it; the same without the guard; and false alarms over healthy resumes.
A new cause is a function of a few lines in `causes_*.py`; `catalogue.py` lists all of them.
"""

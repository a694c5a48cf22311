"""Comparisons of the guard; `../first_step.py` lists what is compared before step 1.

`memory.py` compares state, `run.py` files, objects and journal, `tripwires.py` the first steps; `check.py` is one check.
"""

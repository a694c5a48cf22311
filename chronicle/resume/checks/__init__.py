"""Comparisons of the guard; `../first_step.py` lists what is compared before step 1.

`memory.py` compares state, `run.py` files, objects and journal; `check.py` is one check.
"""

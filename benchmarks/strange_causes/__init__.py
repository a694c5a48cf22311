"""Causes that the guard was not written for: a small language model in four trainers' forms, resumed with one thing changed.

`scripts.py` holds the four scripts, `causes.py` what is changed, `__main__.py` plays them and prints the table. Unlike
`planted_bugs`, the scripts use the guard with its defaults: one line, nothing promised.
"""

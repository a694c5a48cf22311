"""Causes that the guard was not written for: a small language model as a plain loop and with Accelerate, resumed with a change.

`scripts.py` holds the two scripts, `causes.py` what is changed, `__main__.py` plays them and prints the table. Unlike
`planted_bugs`, the scripts use the guard with its defaults: one line, nothing promised.
"""

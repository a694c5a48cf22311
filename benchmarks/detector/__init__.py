"""How good the spike detector is: labelled real curves, a generator calibrated to the seed's run, rules of other tools.

`python -m benchmarks.detector` prints the tables; `--json FILE` keeps them. Nothing here is imported by the product.
"""

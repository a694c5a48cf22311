"""Hardware events: Xid and ECC lines of kernel logs, `nvidia-smi` text, nodes taken out of use.

`events` parses text (pure), `nodes` folds the journal into the set of excluded nodes (pure), `place` finds the step at
which something happened. Nothing here needs a GPU or a driver.
"""

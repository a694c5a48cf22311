"""Starting the process group of a run, watching it, and leaving nothing behind.

`launching` admits, `one_launch` tells the journal what `supervisor` does with the processes. `processes` and `containment`
know the process tree, `orphans` what earlier launches left. Nothing here imports torch, and nothing is done by name.
"""

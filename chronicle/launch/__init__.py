"""Starting the process group of a run, watching it, and leaving nothing behind.

`supervisor` holds one launch: environment, signals, output, heartbeat, journal entries. `processes` and `containment`
know the process tree, `orphans` what earlier launches left. Nothing here imports torch, and nothing is done by name.
"""

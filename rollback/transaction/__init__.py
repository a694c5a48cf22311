"""A plan is applied, undone or recovered: the crash-safe protocol, and the only writer of checkpoints."""

"""A checkpoint: its layout, its manifest, the list of checkpoints, and the state read from one."""

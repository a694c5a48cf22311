"""What a checkpoint is: its layout and manifest, the list of checkpoints, and the state read from one."""

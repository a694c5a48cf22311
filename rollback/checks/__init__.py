"""Whether a checkpoint can be trusted: checks F1 to F11, and a summary for people."""

"""Whether a checkpoint can be trusted: checks F1 to F10, and a summary for people."""

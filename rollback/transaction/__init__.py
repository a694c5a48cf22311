"""Applies, undoes and recovers plans with a crash-safe protocol."""

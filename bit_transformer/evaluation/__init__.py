"""Measurements on a model: held-out bits per byte, telemetry, and the safety gate."""

"""Replay: what step prints cost, and whether the cause of a step that is another one is named."""

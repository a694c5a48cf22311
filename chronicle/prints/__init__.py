"""What every step computed: prints of a few bytes, what they were made by, and how those of two launches compare.

`step_prints.py` and `twice.py` watch a training (they hear the events of the guard); all other files work without torch.
"""

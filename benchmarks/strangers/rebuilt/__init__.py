"""Patterns of public training scripts in our own words: each resumes from its newest checkpoint when there is one."""

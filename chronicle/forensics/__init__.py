"""What happened in a directory without a journal: files, logs and processes read as they are, launches inferred.

`lines` reads single log lines, `scan` collects them from disk, `infer` groups them into launches and names what
contradicts what, `draft` writes timeline and post-mortem. Observed, inferred and unknown are kept apart throughout;
nothing here ends a process or changes a file.
"""

"""The command line: one verb a file, each a function that returns a `CommandResult`; `main.py` renders it."""

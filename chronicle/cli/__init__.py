"""The command line: each verb is a function that returns a `CommandResult`; `main.py` lists the verbs and renders results."""

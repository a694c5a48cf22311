"""The command line of `tests/commands`, here too."""

from tests.commands.conftest import chronicle

__all__ = ["chronicle"]

"""What goes wrong on purpose in `chronicle`. `commands/main.py` turns each class into one sentence and an exit code.

    ChronicleError                 1  something could not be done
    ├── UsageProblem               2  the command needs another word (`--run`, `--yes`)
    ├── Refusal                    3  refused, nothing changed
    ├── JournalError               1  the journal cannot be read or written
    └── SettingsError              2  a settings file or variable is wrong
"""

__all__ = ["ChronicleError", "JournalError", "Refusal", "SettingsError", "UsageProblem"]


class ChronicleError(Exception):
    """Base of all errors raised on purpose here; `remedy` is shown as `hint:`."""

    exit_code = 1

    def __init__(self, message: str, remedy: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy


class UsageProblem(ChronicleError):
    """The command as typed cannot be carried out; nothing changed."""

    exit_code = 2


class SettingsError(UsageProblem):
    """A settings file, variable or flag holds something that makes no sense."""


class Refusal(ChronicleError):
    """Refused to protect a run or a checkpoint; nothing changed."""

    exit_code = 3


class JournalError(ChronicleError):
    """The journal cannot be read or written."""

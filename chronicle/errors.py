"""The exceptions of `chronicle`. `cli/main.py` turns each into one sentence and an exit code.

    ChronicleError                 1  something could not be done
    ├── UsageProblem               2  the command needs another argument (`--run`, `--yes`)
    │   └── SettingsError          2  a settings file, variable or flag is wrong
    ├── Refusal                    3  refused, nothing changed
    │   └── RunCopied              3  the run directory may be a copy
    ├── JournalError               1  the journal cannot be read or written
    └── DataError                  1  the data plan, a shard or a corpus cannot be used

Packages define their own subclasses.
"""


class ChronicleError(Exception):
    """Base of the errors that are raised on purpose; `remedy` is the way out, shown as `hint:`."""

    exit_code = 1

    def __init__(self, message: str, remedy: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy


class Declined(Exception):
    """The user answered no: nothing was changed, which is no error."""


class UsageProblem(ChronicleError):
    """The command cannot run with these arguments; nothing changed."""

    exit_code = 2


class SettingsError(UsageProblem):
    """A settings file, variable or flag has a wrong value."""


class Refusal(ChronicleError):
    """Refused to protect a run or a checkpoint; nothing changed."""

    exit_code = 3


class RunCopied(Refusal):
    """The run directory may be a copy of another one: nothing is written until a person declares what it is.

    `run_dir` is this directory, `origin` the recorded one.
    """

    run_dir: str = ""
    origin: str = ""


class JournalError(ChronicleError):
    """The journal cannot be read or written."""


class DataError(ChronicleError):
    """The data plan, a shard or a corpus cannot be used. Base of the errors of `chronicle.data`."""

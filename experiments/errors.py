"""The errors of studies, with their exit codes.

ChronicleError
└── StudyError          1  base of everything raised here
    ├── BadStudy        2  a study file is not usable; the message names the key
    ├── GateFailed      3  the control arm is not bit-identical, or data differ before the treatment: no report
    └── NotRegistered   2  the journal has no registration of this study, or one of another plan
"""

from chronicle.errors import ChronicleError


class StudyError(ChronicleError):
    """Base of the errors of studies; `remedy` is shown as `hint:`."""


class BadStudy(StudyError):
    """A study file cannot be used; nothing has been started."""

    exit_code = 2


class GateFailed(StudyError):
    """The controls of the study failed, so its contrasts are not reported."""

    exit_code = 3


class NotRegistered(StudyError):
    """The journal holds no registration of this study, or one of another plan."""

    exit_code = 2

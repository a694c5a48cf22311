"""Errors of the data plan.

    DataError
    ├── PlanChanged     the plan of a checkpoint is not the plan of this run
    ├── ShardProblem    a shard is missing, truncated, or not what its manifest says
    └── CorpusMissing   a source of text is not on this machine
"""

from chronicle.errors import ChronicleError


class DataError(ChronicleError):
    """Base of the errors of `chronicle.data`."""


class PlanChanged(DataError):
    """The stored plan and the present plan differ; the message lists the fields."""


class ShardProblem(DataError):
    """A tar or its index cannot be used; the message names the file."""


class CorpusMissing(DataError):
    """A corpus is asked for that is not installed; the remedy names the command that installs it."""

"""The known checkpoint formats, one file per writer. To add one: a file here, and a line in `FORMATS`.

The order matters: a format that contains the files of another comes first.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollback.checkpoint.formats.accelerate import AccelerateFormat
from rollback.checkpoint.formats.dcp import DcpFormat
from rollback.checkpoint.formats.deepspeed import AccelerateDeepSpeedFormat, DeepSpeedFormat, UniversalFormat
from rollback.checkpoint.formats.format import CheckpointFormat
from rollback.checkpoint.formats.torch_checkpoint import LightningFormat, TorchFormat
from rollback.checkpoint.formats.transformers import TransformersFormat
from rollback.checkpoint.layout import DirectoryEntry

FORMATS: tuple[CheckpointFormat, ...] = (
    AccelerateDeepSpeedFormat(),
    AccelerateFormat(),
    TransformersFormat(),
    UniversalFormat(),
    DeepSpeedFormat(),
    DcpFormat(),
    LightningFormat(),
    TorchFormat(),
)


def find_format(name: str, entries: Sequence[DirectoryEntry]) -> CheckpointFormat | None:
    """The first format that claims a directory called `name` with these entries, or None."""
    return next((known for known in FORMATS if known.claims(name, entries)), None)


def format_named(name: str) -> CheckpointFormat | None:
    """The format with that name, or None."""
    return next((known for known in FORMATS if known.name == name), None)

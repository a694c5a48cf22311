"""The known checkpoint formats, one file per writer; those that are read and named alone share `named`.

To add one: a file here, and a line in `FORMATS`.
The order matters: a format that contains the files of another comes first.
"""

from __future__ import annotations

from rollback.checkpoint.formats.accelerate import AccelerateFormat
from rollback.checkpoint.formats.dcp import DcpFormat, MegatronFormat
from rollback.checkpoint.formats.deepspeed import AccelerateDeepSpeedFormat, DeepSpeedFormat, UniversalFormat
from rollback.checkpoint.formats.folders import FOLDERS, ScriptFolder
from rollback.checkpoint.formats.format import CheckpointFormat
from rollback.checkpoint.formats.named import NAMED
from rollback.checkpoint.formats.torch_checkpoint import LightningFormat, TorchFormat
from rollback.checkpoint.formats.transformers import TransformersFormat

SCRIPT_FOLDER, TORCH = ScriptFolder(), TorchFormat()

FORMATS: tuple[CheckpointFormat, ...] = (
    AccelerateDeepSpeedFormat(),
    AccelerateFormat(),
    TransformersFormat(),
    UniversalFormat(),
    DeepSpeedFormat(),
    MegatronFormat(),
    *FOLDERS,
    *NAMED,
    DcpFormat(),
    SCRIPT_FOLDER,
    LightningFormat(),
    TORCH,
)

"""Old runs brought into a journal: entries, curves and chronicles of other tools become the form that all views tell.

Every importer reads and returns an `Import`; `writing` is the only one that writes. What a source does not say stays
unknown. Plain logs (JSONL, CSV, Megatron, Hugging Face, …) are read by `chronicle.metrics.readers`.
"""

from chronicle.integrations.recognise import FORMATS, read_source
from chronicle.integrations.foreign_journals import Draft, Import
from chronicle.integrations.importing import write_import

__all__ = ["FORMATS", "Draft", "Import", "read_source", "write_import"]

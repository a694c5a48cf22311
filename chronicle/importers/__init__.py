"""Old runs brought into a journal: entries, curves and chronicles of other tools become the form that all views tell.

Every importer reads and returns an `Import`; `writing` is the only one that writes. What a source does not say stays
unknown. Plain logs (JSONL, CSV, Megatron, Hugging Face, …) are read by `chronicle.metrics.readers`.
"""

from chronicle.importers.recognise import FORMATS, read_source
from chronicle.importers.sources import Draft, Import
from chronicle.importers.writing import write_import

__all__ = ["FORMATS", "Draft", "Import", "read_source", "write_import"]

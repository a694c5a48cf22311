"""Checkpoint directories in; findings, plans and receipts out.

`rollback` reads, verifies and edits the checkpoints that training frameworks write without importing torch and
without executing a byte of them: pickles are read by their opcodes, zip records by their own headers.
It knows no journal, no command line and no trainer; `chronicle` is built on it.
Start with `rollback.checkpoint.listing` (what is there), `rollback.checkpoint.listing` (what it says), `rollback.checks.verify` (whether to trust it).
"""

from rollback.errors import RollbackError
from rollback.findings import Finding, Severity

__all__ = ["Finding", "RollbackError", "Severity"]

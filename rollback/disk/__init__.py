"""Durable and atomic writes, bounded reads, checksums, the lock and the object store."""

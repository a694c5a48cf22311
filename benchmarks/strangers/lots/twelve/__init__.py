"""Twenty-five scripts of strangers, frozen on 2026-11-23."""

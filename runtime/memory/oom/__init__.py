"""Out-of-memory reports: evidence, remedies that would have fitted, and killed ranks."""

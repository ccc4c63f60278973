"""Rebuild of an engine in its process: another ds config, with the same model, ranks and state."""

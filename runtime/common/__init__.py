"""Helpers for all packages: fail-open hooks, patches, undo, the ds config, host collectives."""

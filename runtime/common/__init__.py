"""Helpers for all packages: fail-open guards, patches, undo, the ds config, rank agreement."""

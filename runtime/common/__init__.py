"""Helpers for all packages: fail-open guards, patches, undo, the ds config, rank host_group."""

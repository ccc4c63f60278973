"""Modules that all packages use: fail-open hooks, patches, undo, ds config, host collectives."""

"""Runs one accumulation window: a batch is split into micro-batches and becomes one update.

This package imports no module that changes an engine. `trainer.window_runner` imports such modules
to recover from out-of-memory errors, so it lies outside this package.
"""

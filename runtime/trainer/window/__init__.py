"""Runs one accumulation window: a batch is split into micro-batches and becomes one update.

This package imports nothing that changes an engine. `trainer.window_runner` runs the windows and
recovers from out-of-memory errors, so it lies outside.
"""

"""Monitors, trains and tunes a DeepSpeed run."""

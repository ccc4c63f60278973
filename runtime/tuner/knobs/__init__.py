"""Reads, sets and restores the settings that the tuner changes (knobs)."""

"""Setters of the tuner's knobs; every change has an undo."""

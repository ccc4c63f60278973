"""Settings of a live engine that can be changed between two windows, each with its undo."""

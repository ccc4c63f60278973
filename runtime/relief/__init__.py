"""What gives memory back on a live engine, between two windows: each change with its undo."""

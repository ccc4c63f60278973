"""Engine rebuild: replaces a running engine by one with another ds config, and keeps its state."""

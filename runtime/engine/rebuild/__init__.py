"""Replaces a running engine by an engine with another ds config, and keeps the training state."""

"""Checkpoints of a run: saved completely or not at all, and loaded bit for bit."""

"""Implements the commands `run`, `estimate` and `demo`, and attaches to a script."""

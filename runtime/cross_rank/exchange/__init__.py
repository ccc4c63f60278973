"""Exchanges messages between the ranks over the c10d store, and merges the messages."""

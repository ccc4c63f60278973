"""Recovers from out-of-memory errors: aborts the window, splits its batch again, and replays it."""

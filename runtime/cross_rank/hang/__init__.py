"""Hangs: when training no longer moves, who is missing where, and the report of it."""

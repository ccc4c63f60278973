"""Tunes a running job: changes its settings, and keeps the changes that prove faster.

`session.py` runs it on all ranks, `policy/` decides on plain data, and `knobs/` reads and sets the
settings.
"""

"""The auto-tuner: changes settings of a running job, and keeps those that prove faster.

`session.py` runs it on all ranks, `policy/` decides on plain data, and `knobs/` reads and sets the
settings.
"""

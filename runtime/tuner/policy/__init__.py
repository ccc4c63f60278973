"""The decisions of the tuner, made from plain data alone."""

"""Command line: the commands `run`, `estimate` and `demo`, and attaching to a script."""

"""The command line: run, attach, estimate and demo."""

"""The command line: run, attach, estimate, tune and demo."""

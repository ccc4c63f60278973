"""The command line: run, attach, explain, tune and demo."""

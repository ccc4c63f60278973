"""The auto-tuner of a run: its session on the ranks, its history and its reports."""

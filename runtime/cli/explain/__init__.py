"""The command `explain`."""

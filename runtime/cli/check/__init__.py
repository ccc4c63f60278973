"""Checks machine, software and configuration before a run: `zerowatch check`."""

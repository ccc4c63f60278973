"""Estimates communication and memory of a ds config before it runs: `zerowatch estimate`."""

"""Compares the ranks over the c10d store, to find waits, stragglers, divergence and hangs."""

"""Compares the ranks over the c10d store: waits and causes, stragglers, divergence, hangs."""

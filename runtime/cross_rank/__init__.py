"""Ranks compared over the c10d store: waits and their causes, stragglers, divergence."""

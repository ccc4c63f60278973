"""Estimates of the traffic and memory of a ds config, before the run and during it."""

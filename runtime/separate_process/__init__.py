"""Moves the analysis of a rank's measurements into a process of its own (`process.separate`)."""

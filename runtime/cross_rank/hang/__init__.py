"""Detects hangs, finds which ranks are missing at which collective, and writes a report."""

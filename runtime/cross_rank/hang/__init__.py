"""Detects hangs: which ranks are missing at which collective, and a report."""

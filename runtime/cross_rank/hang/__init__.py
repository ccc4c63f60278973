"""Hangs: detection, the ranks that are missing at a collective, and the report."""

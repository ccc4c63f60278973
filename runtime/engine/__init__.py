"""Reversible changes to a live engine."""

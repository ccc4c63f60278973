"""Tracks the collectives of this rank: their sequence and their costs."""

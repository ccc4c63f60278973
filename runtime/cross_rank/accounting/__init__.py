"""The collectives of this rank: their sequence and their costs."""

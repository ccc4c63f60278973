"""The calls of this rank: their sequence, and what they cost."""

"""Compresses gradients: encodes them in fewer bytes while the ranks sum them."""

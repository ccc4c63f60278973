"""Gradient compression: gradients are encoded in fewer bytes while the ranks sum them."""

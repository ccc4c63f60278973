"""Compression of gradients between the ranks, with error feedback."""

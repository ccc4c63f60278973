"""Gradients compressed for their way between the ranks, with error feedback."""

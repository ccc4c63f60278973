"""Gradients compressed on their way between the ranks, with what was lost sent along later."""

"""Implements `zerowatch demo`: trains a byte-level GPT on the source of the standard library."""

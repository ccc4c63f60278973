"""Hooks on the engine, its data loader and its memory, which make a raw step of each step."""

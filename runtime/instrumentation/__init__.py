"""Hooks on the engine, its data loader and its phases, which yield a raw step at its end."""

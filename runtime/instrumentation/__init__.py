"""Hooks on the engine and its data loader, which yield a raw step at the end of each."""

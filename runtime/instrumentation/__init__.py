"""Installs hooks on the engine, data loader and memory, which measure each step as a raw step."""

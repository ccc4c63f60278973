"""Live settings: values of a running engine that can be changed between windows, and undone."""

"""Changes settings of a running engine between windows, and undoes the changes."""

"""How values leave the process; each library stands in one file."""

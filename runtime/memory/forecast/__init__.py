"""How much memory the next steps will need, and how likely that is too much: pure, on series."""

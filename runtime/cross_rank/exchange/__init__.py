"""Messages between the ranks over the c10d store, and how they are merged."""

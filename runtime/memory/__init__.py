"""What fills memory, what the next steps will need, leaks, and reports of out-of-memory errors."""

"""A run on disk: saved whole or not at all, and taken up again bit for bit."""

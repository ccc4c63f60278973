"""The built-in job: a byte-level GPT trained on the Python standard library."""

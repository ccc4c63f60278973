"""The knobs of a job as the tuner sees them: read, turned between two windows, and put back."""

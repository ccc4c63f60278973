"""The live page of a run, which rank 0 serves beside its metrics."""

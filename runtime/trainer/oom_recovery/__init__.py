"""Recovery from out-of-memory errors: a window is aborted, planned again, and replayed."""

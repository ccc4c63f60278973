"""Recovery from out-of-memory errors: the window is aborted, split again, and replayed."""

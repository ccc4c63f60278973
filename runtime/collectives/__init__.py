"""Records every collective of the process, and measures how long it takes and blocks training."""

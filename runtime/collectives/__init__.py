"""Recording and timing of every collective of the process."""

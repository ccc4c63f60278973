"""The knobs of a run that the tuner sets, all with an undo."""

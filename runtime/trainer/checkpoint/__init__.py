"""Checkpoints of a TrainingRun: each is complete or absent, and a resumed run is bitwise equal."""

"""TrainingRun's loop: accumulation windows, data, checkpoints, out-of-memory recovery."""

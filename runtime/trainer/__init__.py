"""TrainingRun's loop: windows, data, checkpoints, and recovery from out-of-memory errors."""

"""Runs TrainingRun's loop: accumulation windows, data, checkpoints, out-of-memory recovery.

`window_runner` runs the windows and recovers from errors: it is above `window/`, `oom_recovery/`.
"""

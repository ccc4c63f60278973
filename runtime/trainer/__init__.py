"""Runs TrainingRun's loop: accumulation windows, data, checkpoints, out-of-memory recovery.

`window_runner` runs the windows and recovers from errors. It imports `window/` and `oom_recovery/`.
"""

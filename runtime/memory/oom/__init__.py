"""Reports out-of-memory errors, with advice on how to avoid them, and ranks that were killed.

This package only reports errors. `runtime/trainer/oom_recovery/` lets a TrainingRun continue after
an error, and `runtime/memory/forecast/` predicts the risk of an error before it happens.
"""

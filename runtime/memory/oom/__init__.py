"""Reports of out-of-memory errors: evidence, changes that would have fitted, killed ranks.

This package only reports; `runtime/trainer/oom_recovery/` lets a TrainingRun continue after an
error. The risk of an error that has not happened is in `runtime/memory/forecast/`.
"""

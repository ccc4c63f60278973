"""Explains what fills a rank's memory: categories, leaks, forecasts, errors, offload traffic.

The bytes themselves are read by `runtime/devices/`. Neighbors:

- `runtime/instrumentation/memory_hooks.py` samples memory on the training thread
- `runtime/monitor/memory_monitor.py` runs this package's parts on the watch thread
- `runtime/estimator/` computes memory from a ds config, without measuring
- `runtime/trainer/oom_recovery/` continues a TrainingRun after an out-of-memory error
- `metrics/catalog/memory.py` declares the metrics
"""

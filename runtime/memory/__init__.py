"""Explains what fills the memory of a rank, and finds leaks and out-of-memory risks.

`runtime/devices/` reads the bytes. Related modules:

- `runtime/instrumentation/memory_hooks.py` samples memory on the training thread
- `runtime/monitor/memory_monitor.py` runs this package's parts on the watch thread
- `runtime/estimator/` computes memory from a ds config, without measuring
- `runtime/trainer/oom_recovery/` continues a TrainingRun after an out-of-memory error
- `metrics/catalog/memory.py` declares the metrics
"""

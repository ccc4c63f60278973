"""Writes the values of a run to experiment trackers: W&B, MLflow, TensorBoard, DeepSpeed's monitor.

A `Sink` is one destination. `SinkRunner` feeds it on a thread of its own, on rank 0 only.
"""

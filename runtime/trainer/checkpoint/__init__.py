"""Checkpoints of a TrainingRun: each is complete or absent, and a resumed run is bitwise equal.

With DeepSpeed's Adam on the CPU a resumed run may differ by rounding errors, because its powers of
beta depend on earlier steps.
"""

"""Checkpoints of a TrainingRun: each is complete or absent, and a resumed run is bitwise equal.

Except by rounding with DeepSpeed's Adam on CPU, whose powers of beta depend on earlier steps.
"""

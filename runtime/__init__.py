"""Monitoring, training loop and tuner of a DeepSpeed run."""

"""Reversible changes to a running DeepSpeed engine: settings, gradient compression, rebuild."""

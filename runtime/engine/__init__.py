"""Changes a running DeepSpeed engine reversibly: settings, gradient compression, rebuild."""

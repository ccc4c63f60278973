"""A DeepSpeed run that is watched."""

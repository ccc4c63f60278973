"""Reads run folders, and makes reports of runs. It imports neither torch nor deepspeed."""

"""Counts bytes and seconds that ZeRO offload moves between device, host and NVMe.

How many bytes offloading would save is computed in `runtime/estimator/`.
"""

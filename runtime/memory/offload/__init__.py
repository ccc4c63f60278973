"""Bytes that ZeRO offload moves between device, host and NVMe, and the time it takes."""

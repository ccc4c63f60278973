"""Colours of series, the same on every dashboard."""

from __future__ import annotations

PHASES = {
    "forward": "blue",
    "backward": "purple",
    "optimizer": "yellow",
    "data": "orange",
    "other": "text",
    "eval": "super-light-green",
    "checkpoint": "dark-green",
}
CAUSES = {
    "imbalance": "orange",
    "latency": "yellow",
    "redundancy": "purple",
    "bandwidth": "blue",
}
CATEGORIES = {
    "parameters": "blue",
    "gradients": "purple",
    "optimizer": "yellow",
    "activations": "orange",
    "comm_buffers": "green",
    "other": "text",
}
BYTES_OF_A_STEP = {"measured": "blue", "predicted": "yellow", "least": "green"}
MEMORY_STATES = {
    "limit": "red",
    "peak": "orange",
    "predicted peak": "yellow",
    "allocated": "blue",
    "reserved": "super-light-blue",
    "fragmented": "purple",
    "before training": "text",
}

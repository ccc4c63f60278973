"""Writing sizes for people."""

from __future__ import annotations


def format_bytes(num_bytes: float) -> str:
    """Write a size with its binary unit, in three digits."""
    for unit in ("B", "KiB", "MiB"):
        if abs(num_bytes) < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB" if abs(num_bytes) < 1000 else f"{num_bytes / 1024:.1f} TiB"

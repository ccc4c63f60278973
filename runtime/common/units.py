"""Writing sizes for people."""

from __future__ import annotations


def format_bytes(num_bytes: float) -> str:
    """Write a size with its binary unit, in three digits or four."""
    for unit in ("B", "KiB", "MiB"):
        if abs(num_bytes) < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    unit, size = ("GiB", num_bytes) if abs(num_bytes) < 1000 else ("TiB", num_bytes / 1024)
    return f"{size:.2f} {unit}" if abs(size) < 10 else f"{size:.1f} {unit}"

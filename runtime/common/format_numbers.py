"""Formats sizes, counts and ratios as text for reports."""

from __future__ import annotations

UNKNOWN = "-"


def format_bytes(num_bytes: float | None) -> str:
    """Write a size with its binary unit and three or four digits, or UNKNOWN for None."""
    if num_bytes is None:
        return UNKNOWN
    for unit in ("B", "KiB", "MiB"):
        if abs(num_bytes) < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    unit, size = ("GiB", num_bytes) if abs(num_bytes) < 1000 else ("TiB", num_bytes / 1024)
    return f"{size:.2f} {unit}" if abs(size) < 10 else f"{size:.1f} {unit}"


def format_count(number: int) -> str:
    """Write a count with K, M or B (10^9) and three digits, such as 125M."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)


def format_ratio(ratio: float | None) -> str:
    """Write a ratio as a whole percentage, or UNKNOWN for None."""
    return UNKNOWN if ratio is None else f"{ratio:.0%}"

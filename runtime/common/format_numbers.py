"""Formats sizes, counts, ratios and ranks as text for reports."""

from __future__ import annotations

from collections.abc import Sequence

UNKNOWN = "-"
MAX_NAMED_RANKS = 8  # in one sentence


def format_bytes(num_bytes: float | None) -> str:
    """Write a size with its binary unit and three or four digits, or UNKNOWN for None."""
    if num_bytes is None:
        return UNKNOWN
    for unit in ("B", "KiB", "MiB"):
        if abs(num_bytes) < 999.5:  # what is more has four digits once it is rounded
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    unit, size = ("GiB", num_bytes) if abs(num_bytes) < 1000 else ("TiB", num_bytes / 1024)
    return f"{size:.2f} {unit}" if abs(size) < 10 else f"{size:.1f} {unit}"


def format_count(number: int) -> str:
    """Write a count with K, M or B (10^9) and three digits, such as 125M."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= 0.9995 * size:
            return f"{number / size:.3g}{unit}"
    return str(number)


def format_ratio(ratio: float | None) -> str:
    """Write a ratio as a whole percentage, or UNKNOWN for None."""
    return UNKNOWN if ratio is None else f"{ratio:.0%}"


def format_seconds(seconds: float | None) -> str:
    """Return a short time with three digits, such as "412 ms"."""
    if seconds is None:
        return UNKNOWN
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * size:
            return f"{seconds / size:.3g} {unit}" if seconds < 999.5 else f"{seconds:,.0f} {unit}"
    return f"{seconds / 1e-6:.3g} µs" if seconds else "0 s"


def format_duration(seconds: float) -> str:
    """Return a long time, such as "3 h 12 min"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.3g} s"


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ranks, such as "ranks 1, 2". If there are many, only the first are listed."""
    named = ", ".join(map(str, ranks[:MAX_NAMED_RANKS]))
    num_more = len(ranks) - MAX_NAMED_RANKS
    more = f" and {num_more} more" if num_more > 0 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {named}{more}"

"""A clock that changes only when a test sets it."""

from __future__ import annotations


class FakeClock:
    """Call it for the seconds."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds

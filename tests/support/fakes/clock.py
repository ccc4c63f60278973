"""A clock that changes only when a test sets it."""

from __future__ import annotations


class FakeClock:
    """Manual clock; calling it returns the seconds that the test has set."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds

"""Whether a change of shares made windows faster; if not, what they were before."""

from __future__ import annotations

from .shares import Shares

LEAST_GAIN = 0.02  # of a window's wall time; less is within its noise
FIRST_REST = 16  # exchanges without a change after one that did not help; doubled each time
LONGEST_REST = 1024


class ShareTrial:
    """Watches one change at a time, on all ranks by the same figures.

    Attributes:
        is_under_way: Whether a change waits for its verdict.
    """

    def __init__(self) -> None:
        self.is_under_way = False
        self._before: Shares = ()
        self._seconds_before = 0.0
        self._from_index = 0
        self._rest = 0
        self._next_rest = FIRST_REST
        self._takes_back = False

    def shares_change(self, before: Shares, from_index: int, seconds: float) -> None:
        """Begin, as shares change from a batch on and windows have taken so long so far."""
        if self._takes_back:
            self._takes_back = False
            return
        self.is_under_way = True
        self._before, self._from_index, self._seconds_before = before, from_index, seconds

    def verdict(self, first_index: int, seconds: float) -> Shares | None:
        """Judge by windows from a batch on; return the shares to go back to, if any.

        While some of these windows are from before the change there is no verdict.
        """
        if first_index < self._from_index:
            return None
        self.is_under_way = False
        if seconds <= (1 - LEAST_GAIN) * self._seconds_before:
            self._next_rest = FIRST_REST
            return None
        self._takes_back = True
        self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, LONGEST_REST)
        return self._before

    def rests(self) -> bool:
        """Whether no change is to be tried at this exchange; to be asked once at each."""
        self._rest = max(0, self._rest - 1)
        return self._rest > 0

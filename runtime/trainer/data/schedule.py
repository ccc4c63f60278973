"""From which batch on which shares hold: a plan that all ranks have alike."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from operator import itemgetter
from typing import Any

from .shares import Shares, even_shares

# Changes that are remembered: more than lie between a batch that is loaded ahead and one of which
# the state was saved.
MAX_CHANGES = 64


class ShareSchedule:
    """Says how each batch is shared out, by its index, again and again the same.

    Attributes:
        next_index: The first batch that was not asked for yet, on this rank.
    """

    def __init__(self, num_samples: int, num_ranks: int) -> None:
        """Begin evenly, with batches of `num_samples` over all ranks."""
        self.num_samples, self.num_ranks = num_samples, num_ranks
        self.next_index = 0
        self._changes: list[tuple[int, Shares]] = [(0, even_shares(num_samples, num_ranks))]

    @property
    def latest(self) -> Shares:
        """The shares that were agreed on last, whether they hold yet or not."""
        return self._changes[-1][1]

    def shares_at(self, index: int) -> Shares:
        """Return the shares of a batch, which are settled from now on."""
        self.next_index = max(self.next_index, index + 1)
        place = bisect_right(self._changes, index, key=itemgetter(0))
        return self._changes[max(place - 1, 0)][1]

    def change(self, from_index: int, shares: Shares) -> None:
        """Let shares hold from a batch on.

        Raises:
            ValueError: The batch was asked for already, or these are no shares of it.
        """
        if from_index < self.next_index:
            raise ValueError(
                f"batch {from_index} is shared out already; shares can change from batch "
                f"{self.next_index} on"
            )
        self._check(shares)
        while len(self._changes) > 1 and self._changes[-1][0] >= from_index:
            self._changes.pop()
        self._changes.append((from_index, tuple(shares)))
        del self._changes[:-MAX_CHANGES]

    def state_dict(self) -> dict[str, Any]:
        """Return the plan, to be loaded with the position of the data."""
        return {"changes": [[index, list(shares)] for index, shares in self._changes]}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Take a plan over; one of other ranks or other batches is left aside.

        Returns:
            Whether it was taken.
        """
        changes = [(int(index), tuple(map(int, shares))) for index, shares in state["changes"]]
        try:
            for _, shares in changes:
                self._check(shares)
        except ValueError:
            return False
        self._changes = changes
        return True

    def _check(self, shares: Shares) -> None:
        fits = len(shares) == self.num_ranks and sum(shares) == self.num_samples
        if not fits or min(shares) < 1:
            raise ValueError(
                f"{list(shares)} are no shares of {self.num_samples} samples for {self.num_ranks} "
                "ranks: one a rank, none under 1, and together the batch"
            )

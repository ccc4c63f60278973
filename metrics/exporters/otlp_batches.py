"""Divides the metrics of each interval into batches of few series, and decides on their order.

A receiver may refuse a batch for its content, by a limit on the rate of requests, or because it is
down. Its answer does not show which of them applies, so the order must suit all three.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator

from .telemetry_data import Family

SERIES_AT_ONCE = 48  # encoding a batch holds the GIL


class BatchOrder:
    """The batches of one interval after the other, and which of them were refused before.

    - The batches that were not accepted in the last interval are first, because a limit on the rate
      of requests would otherwise always refuse the same ones.
    - After one of them is refused again, which may be for its content, all others are sent before
      the rest of them. If it was the first request of all, it is the last of them from then on.
    - The last interval of a run begins with the families with the end of the run, in a batch of
      their own, and goes on with the others, because it may end at any moment. If that batch is
      refused, it is sent once more as soon as another one is accepted: there is no later interval.
    - If nothing was accepted, the next interval begins with other batches that were not tried.

    Attributes:
        outcomes: Whether each batch of the interval that was sent was accepted.
    """

    def __init__(self) -> None:
        self.outcomes: list[bool] = []
        self._held: list[list[str]] = []  # names of the families of each batch
        self._first = ""
        self._retries: deque[list[Family]] = deque()
        self._others: deque[list[Family]] = deque()
        self._retries_first = True
        self._is_retry = False
        self._end: list[Family] = []  # the batch with the end of the run, until it is done
        self._is_end_refused = False
        self._refused_retries: list[list[Family]] = []
        self._refused_others: list[list[Family]] = []
        self._refused_first: list[list[Family]] = []

    @property
    def is_accepted(self) -> bool:
        """Whether a batch of the interval was accepted; true if there is none."""
        return any(self.outcomes) or not self.outcomes

    @property
    def has_others(self) -> bool:
        """Whether a batch is left that was accepted in the last interval, or is new."""
        return bool(self._others)

    @property
    def is_end_left(self) -> bool:
        """Whether the batch with the end of the run is still to be sent."""
        return bool(self._end)

    def begin(self, found: list[Family], *, final: bool, end: Collection[str] = ()) -> None:
        """Begin an interval.

        Args:
            found: The families to send.
            final: Whether this is the last interval of the run.
            end: The names of the families that the last interval sends first.
        """
        self._retries_first = self.is_accepted and not final
        self.outcomes = []
        first_batch = [family for family in found if final and family.name in end]
        if first_batch:
            found = [family for family in found if family.name not in end]
        held = {name for names in self._held for name in names}
        rest = [family for family in found if family.name not in held]
        names = [family.name for family in rest]
        first = names.index(self._first) if self._first in names else 0
        retries = [[each for each in found if each.name in held_names] for held_names in self._held]
        self._retries = deque(batch for batch in retries if batch)
        self._others = deque([*_batches(rest[first:]), *_batches(rest[:first])])
        self._end, self._is_end_refused = first_batch, False
        if first_batch:
            self._others.appendleft(first_batch)
        self._refused_retries, self._refused_others, self._refused_first = [], [], []

    def take(self) -> list[Family] | None:
        """Return the next batch; None if there is no more."""
        self._is_retry = bool(self._retries) and (self._retries_first or not self._others)
        batches = self._retries if self._is_retry else self._others
        return batches.popleft() if batches else None

    def note(self, batch: list[Family], *, was_accepted: bool) -> None:
        """Note whether the receiver has accepted the batch that was returned last."""
        if not was_accepted:
            self._retries_first = False
            if not self._is_retry:
                self._refused_others.append(batch)
            elif not self.outcomes:
                self._refused_first.append(batch)
            else:
                self._refused_retries.append(batch)
        self.outcomes.append(was_accepted)
        self._note_end(batch, was_accepted=was_accepted)

    def end(self) -> None:
        """End the interval, in which some batches may not have been sent."""
        held = [*self._refused_retries, *self._retries]
        self._first = ""
        if self.is_accepted:
            held += [*self._others, *self._refused_others]
        elif self._others:
            self._first = self._others[0][0].name
        held += self._refused_first
        self._held = [[family.name for family in batch] for batch in held]

    def _note_end(self, batch: list[Family], *, was_accepted: bool) -> None:
        if batch is self._end:
            if was_accepted or self._is_end_refused:
                self._end = []
            self._is_end_refused = True
        elif was_accepted and self._end:
            self._others.appendleft(self._end)


def _batches(found: Iterable[Family]) -> Iterator[list[Family]]:
    """Divide families into batches of few series. A histogram has one series per bucket."""
    batch: list[Family] = []
    num_series = 0
    for family in found:
        batch.append(family)
        num_series += len(family.points) * (1 + len(family.bounds))
        if num_series >= SERIES_AT_ONCE:
            yield batch
            batch, num_series = [], 0
    if batch:
        yield batch

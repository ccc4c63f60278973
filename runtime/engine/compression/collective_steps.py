"""Overlap of several exchanges: while the bytes of one are in flight, the next is encoded.

An exchange is a generator that starts a collective, yields its handle, and continues once that has
completed. All ranks run the same steps in the same order, whichever completes first.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any, Protocol

CollectiveSteps = Generator[Any, None, None]


class Reduction(Protocol):
    """Reduction of one bucket by one or more exchanges."""

    def exchanges(self) -> Iterable[CollectiveSteps]:
        """Return the exchanges to run."""

    def finish(self) -> None:
        """Use the results, once all exchanges have completed."""


class InFlightExchange:
    """One exchange that has been started."""

    def __init__(self, steps: CollectiveSteps) -> None:
        """Start it."""
        self._steps = steps
        self._work = next(steps, None)

    def advance(self) -> bool:
        """Wait for its collective and start the next; return whether there was one."""
        if self._work is None:
            return False
        self._work.wait()
        self._work = next(self._steps, None)
        return self._work is not None

    def discard(self) -> None:
        """Wait for the collective in flight, and discard its result."""
        if self._work is not None:
            self._work.wait()
        self._work = None
        self._steps.close()


class InFlightReduction:
    """Reduction of one bucket whose exchanges have been started."""

    def __init__(self, reduction: Reduction) -> None:
        """Start all its exchanges."""
        self._reduction = reduction
        self._in_flight = [InFlightExchange(steps) for steps in reduction.exchanges()]

    def advance(self) -> None:
        """Wait for the present collective of each exchange, and start their next ones."""
        self._in_flight = [exchange for exchange in self._in_flight if exchange.advance()]

    def complete(self) -> None:
        """Wait for all exchanges, and use the results."""
        while self._in_flight:
            self.advance()
        self._reduction.finish()

    def discard(self) -> None:
        """Wait for what is in flight, and discard the results."""
        for exchange in self._in_flight:
            exchange.discard()
        self._in_flight = []


def run_all(exchanges: Iterable[CollectiveSteps]) -> None:
    """Run exchanges to their ends, each started before earlier ones are waited for."""
    in_flight: list[InFlightExchange] = []
    for steps in exchanges:
        newest = InFlightExchange(steps)
        in_flight = [exchange for exchange in in_flight if exchange.advance()]
        in_flight.append(newest)
    while in_flight:
        in_flight = [exchange for exchange in in_flight if exchange.advance()]

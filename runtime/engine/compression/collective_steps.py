"""Several exchanges at a time: while the bytes of one travel, the next is encoded.

An exchange is a generator that starts a collective, yields its handle, and goes on once that is
done. All ranks take the same steps in the same order, whatever is done first.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import Any

CollectiveSteps = Generator[Any, None, None]


class InFlightExchange:
    """One exchange on its way."""

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

    def drop(self) -> None:
        """Wait for what travels, and do nothing with it."""
        if self._work is not None:
            self._work.wait()
        self._work = None
        self._steps.close()


def run_all(exchanges: Iterable[CollectiveSteps]) -> None:
    """Run exchanges to their ends, each started before those before it are waited for."""
    flights: list[InFlightExchange] = []
    for steps in exchanges:
        newest = InFlightExchange(steps)
        flights = [flight for flight in flights if flight.advance()]
        flights.append(newest)
    while flights:
        flights = [flight for flight in flights if flight.advance()]


class InFlightReduction:
    """The exchanges of one bucket, started together and ended later."""

    def __init__(self, exchanges: Iterable[CollectiveSteps], finish: Callable[[], None]) -> None:
        """Start them.

        Args:
            exchanges: What travels.
            finish: Called once all have arrived.
        """
        self._flights = [InFlightExchange(steps) for steps in exchanges]
        self._finish = finish

    def advance(self) -> None:
        """Wait for the first collective of each, and start their second ones."""
        self._flights = [flight for flight in self._flights if flight.advance()]

    def arrive(self) -> None:
        """Wait for all of it."""
        while self._flights:
            self.advance()
        self._finish()

    def drop(self) -> None:
        """Wait for what travels; nothing comes of it."""
        for flight in self._flights:
            flight.drop()
        self._flights = []

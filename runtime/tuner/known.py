"""What was found out in each surroundings: the best configuration, and what did not help."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from .diagnose import context_of
from .reading import Reading
from .rules import Denied
from .words import Configuration, Value

logger = logging.getLogger(__name__)


class Known:
    """Of one job; one of the surroundings is the present one.

    Args:
        best: By surroundings, what proved best in earlier runs.
        denied: And what failed.

    Attributes:
        context: The present surroundings; "" until they are told.
    """

    def __init__(
        self,
        best: Mapping[str, Configuration] | None = None,
        denied: Mapping[str, Denied] | None = None,
    ) -> None:
        self.context = ""
        self._near: Reading | None = None
        self._num_alarms = 0
        self._best = dict(best or {})
        self._denied = {context: set(each) for context, each in (denied or {}).items()}

    @property
    def best(self) -> Configuration | None:
        """What proved best in the present surroundings."""
        return self._best.get(self.context)

    @property
    def denied(self) -> Denied:
        """What is not to be tried in them."""
        return frozenset(self._denied.get(self.context, ()))

    def look_around(self, reading: Reading) -> None:
        """Tell where the job is."""
        self.context = context_of(reading, self._near)
        if self._near is None or context_of(self._near) != self.context:
            self._near = reading

    def deny(self, changes: Configuration) -> None:
        """Take it that a change did not help, or would not; of several knobs the first is at it."""
        best = self.best or {}
        if all(best.get(knob) == value for knob, value in changes.items()):
            self._best.pop(self.context, None)  # it is not the best any longer
        first = next(iter(changes.items()))
        self._denied.setdefault(self.context, set()).add(first)

    def gave_up(self, values: Configuration) -> None:
        """Take it that some values took too much memory.

        Those that a trial found are not gone back to; what the user chose may be, once.
        """
        best = self.best or {}
        if values and all(knob in best and best[knob] == each for knob, each in values.items()):
            self.deny(values)

    def found(self, configuration: Configuration, instead_of: Mapping[str, Value]) -> None:
        """Take it that a configuration is better than one with other values of some knobs."""
        self._num_alarms = 0
        self._best[self.context] = configuration
        self._denied.setdefault(self.context, set()).update(instead_of.items())

    def shifted(self, speed: str) -> None:
        """Take it that steps became "slower", say, and that what did not help may help by now.

        Steps whose speed comes and goes would have everything tried again and again: without a
        find in between, only the 1st, 2nd, 4th, 8th... shift counts.
        """
        logger.info("steps have become %s: looking for what helps now", speed)
        self._num_alarms += 1
        if self._num_alarms & (self._num_alarms - 1) == 0:
            self._denied.pop(self.context, None)

"""What was found out in each surroundings: the best configuration, and what did not help."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from .diagnose import context_of
from .reading import Reading
from .verdict_store import Denied, Remembered
from .words import Configuration, Value

logger = logging.getLogger(__name__)


class Known:
    """Of one job; one of the surroundings is the present one.

    Args:
        remembered: By surroundings, what earlier runs came to.
        keep: Remembers what this one came to in some surroundings.

    Attributes:
        context: The present surroundings; "" until they are told.
    """

    def __init__(
        self,
        remembered: Mapping[str, Remembered] | None = None,
        keep: Callable[[str, Remembered], object] = lambda context, remembered: None,
    ) -> None:
        self.context = ""
        self._near: Reading | None = None
        self._num_alarms = 0
        self._on_trial: Configuration = {}
        self._keep = keep
        remembered = remembered or {}
        self._best = {
            context: each.configuration
            for context, each in remembered.items()
            if each.configuration
        }
        self._denied = {context: set(each.denied) for context, each in remembered.items()}
        for context, each in remembered.items():
            if each.on_trial:
                logger.warning(
                    "an earlier run ended while %s was on trial: it is not tried again here",
                    ", ".join(f"{knob}={value}" for knob, value in each.on_trial.items()),
                )
                self._denied[context].add(_first(each.on_trial))

    @property
    def best(self) -> Configuration | None:
        """What proved best in the present surroundings, or was all that was ever used there."""
        return self._best.get(self.context)

    @property
    def denied(self) -> Denied:
        """What is not to be tried in them."""
        return frozenset(self._denied.get(self.context, ()))

    def look_around(self, reading: Reading, configuration: Configuration) -> None:
        """Tell where the job is, and what it works with.

        Where nothing better was found, that is what it comes back to in the surroundings it left.
        """
        left, self.context = self.context, context_of(reading, self._near)
        if left and left != self.context:
            self._best.setdefault(left, configuration)
        if self._near is None or context_of(self._near) != self.context:
            self._near = reading

    def begins(self, changes: Configuration) -> None:
        """Take it that a change goes on trial; should the job die of it, the next run knows."""
        self._on_trial = changes
        self._remember()

    def ends(self) -> None:
        """Take it that nothing is on trial any longer."""
        if self._on_trial:
            self._on_trial = {}
            self._remember()

    def deny(self, changes: Configuration) -> None:
        """Take it that a change did not help, or would not; of several knobs the first is at it."""
        best = self.best or {}
        if all(best.get(knob) == value for knob, value in changes.items()):
            self._best.pop(self.context, None)  # it is not the best any longer
        self._denied.setdefault(self.context, set()).add(_first(changes))
        self.ends()

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
        self._on_trial = {}
        self._remember()

    def shifted(self, speed: str) -> None:
        """Take it that steps became "slower", say, and that what did not help may help by now.

        Steps whose speed comes and goes would have everything tried again and again: without a
        find in between, only the 1st, 2nd, 4th, 8th... shift counts.
        """
        logger.info("steps have become %s: looking for what helps now", speed)
        self._num_alarms += 1
        if self._num_alarms & (self._num_alarms - 1) == 0:
            self._denied.pop(self.context, None)

    def _remember(self) -> None:
        now = Remembered(configuration=self.best or {}, denied=self.denied, on_trial=self._on_trial)
        self._keep(self.context, now)


def _first(changes: Configuration) -> tuple[str, Value]:
    """Return the knob that a change is about; others follow from it."""
    return next(iter(changes.items()))

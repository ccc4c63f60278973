"""What was found out in each surroundings: the best configuration, and what did not help."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

from .diagnose import context_of, contexts_beside
from .history_file import Denied, HistoryEntry, is_within
from .metrics_delta import MetricsDelta
from .types import Configuration, Value

logger = logging.getLogger(__name__)


class HistoryStore(Protocol):
    """What outlives the run."""

    def remember(self, context: str, remembered: HistoryEntry, /) -> None:
        """Keep what this job came to in some surroundings, in the place of what was known."""

    def on_trial(self, changes: Configuration, /) -> None:
        """Keep what is on trial, until told otherwise; nothing if that is empty."""


class NullHistoryStore:
    """A memory of nothing."""

    def remember(self, context: str, remembered: HistoryEntry, /) -> None:
        """Forget it."""

    def on_trial(self, changes: Configuration, /) -> None:
        """Forget it."""


class SearchHistory:
    """Of one job; one of the surroundings is the present one.

    Args:
        remembered: By surroundings, what earlier runs came to.
        died_of: And what was on trial as some of them ended; it is not tried in this run.
        memory: Takes what is to outlive this one.

    Attributes:
        context: The present surroundings; "" until they are told.
    """

    def __init__(
        self,
        remembered: Mapping[str, HistoryEntry] | None = None,
        died_of: Sequence[Configuration] = (),
        memory: HistoryStore | None = None,
    ) -> None:
        self.context = ""
        self._near: MetricsDelta | None = None
        self._num_alarms = 0
        self._is_on_trial = False
        self._memory = memory or NullHistoryStore()
        remembered = remembered or {}
        self._best = {
            context: each.configuration
            for context, each in remembered.items()
            if each.configuration
        }
        self._denied = {context: set(each.denied) for context, each in remembered.items()}
        # Of this run only: what nothing was measured of, such as what memory had no room for.
        self._barred: dict[str, list[Configuration]] = {}
        self._died_of = died_of
        for changes in died_of:
            told = ", ".join(f"{knob}={value}" for knob, value in changes.items())
            logger.warning("an earlier run ended in a trial of %s: not tried in this one", told)

    @property
    def best(self) -> Configuration | None:
        """What proved best in the present surroundings, or was all that was ever used there."""
        best = self._best_here
        if best is None or any(is_within(each, best) for each in self._barred_here):
            return None
        return best

    @property
    def _best_here(self) -> Configuration | None:
        """What is best here; where nothing is known yet, what is on a link about as fast.

        What is measured of a link that nobody else uses differs by a factor of two between runs.
        """
        if self.context in self._best or self.context in self._denied:
            return self._best.get(self.context)
        beside = map(self._best.get, contexts_beside(self.context))
        return next((best for best in beside if best is not None), None)

    @property
    def denied(self) -> Denied:
        """What is not to be tried in them."""
        barred = (_only(each) for each in self._barred_here)
        return frozenset(self._denied.get(self.context, ())).union(*barred)

    @property
    def _barred_here(self) -> Sequence[Configuration]:
        return [*self._died_of, *self._barred.get(self.context, ())]

    def look_around(self, reading: MetricsDelta, configuration: Configuration) -> None:
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
        self._is_on_trial = True
        self._memory.on_trial(changes)

    def ends(self) -> None:
        """Take it that nothing is on trial any longer."""
        if self._is_on_trial:
            self._is_on_trial = False
            self._memory.on_trial({})

    def reject(self, changes: Configuration) -> None:
        """Take it that a change did not help, or did harm.

        The first of its knobs is what it is about, and others follow from it; but not if it was
        what is remembered as the best: that may be several at once.
        """
        was_best = is_within(changes, self._best_here or {})
        if was_best:
            self._best.pop(self.context, None)
        self._denied.setdefault(self.context, set()).update(_only(changes, of_several=not was_best))
        self._remember()
        self.ends()

    def mark_failed(self, changes: Configuration) -> None:
        """Take it that a change could not be tried; a later run may."""
        self._barred.setdefault(self.context, []).append(changes)

    def gave_up(self, values: Configuration) -> None:
        """Take it that some values took too much memory.

        Those that a trial found are not gone back to; what the user chose may be, once.
        """
        if values and is_within(values, self.best or {}):
            self.reject(values)

    def found(self, configuration: Configuration, instead_of: Mapping[str, Value]) -> None:
        """Take it that a configuration is better than one with other values of some knobs."""
        self._num_alarms = 0
        self._best[self.context] = configuration
        self._denied.setdefault(self.context, set()).update(instead_of.items())
        self._remember()
        self.ends()

    def on_speed_shift(self, speed: str) -> None:
        """Take it that steps became "slower", say, and that what did not help may help by now.

        Steps whose speed comes and goes would have everything tried again and again: without a
        find in between, only the 1st, 2nd, 4th, 8th... shift counts.
        """
        logger.info("steps have become %s: what did not help before may help now", speed)
        self._num_alarms += 1
        if self._num_alarms & (self._num_alarms - 1) == 0:
            self._denied.pop(self.context, None)
            self._barred.pop(self.context, None)

    def _remember(self) -> None:
        now = HistoryEntry(
            configuration=self._best.get(self.context, {}),
            denied=frozenset(self._denied.get(self.context, ())),
        )
        self._memory.remember(self.context, now)


def _only(changes: Configuration, *, of_several: bool = True) -> Denied:
    """Return the knob that a change is about, with its value; none if it may be about several."""
    is_sure = of_several or len(changes) == 1
    return frozenset(list(changes.items())[:1] if is_sure else ())

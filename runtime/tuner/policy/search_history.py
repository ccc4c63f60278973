"""Records what trials showed, by context: the best configuration, and changes that did not help."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

from .diagnose import adjacent_contexts, context_of
from .history_file import ExcludedValues, HistoryEntry, is_within
from .metrics_delta import MetricsDelta
from .policy_types import Configuration, Value

logger = logging.getLogger(__name__)


class HistoryStore(Protocol):
    """Stores the history for later runs."""

    def save(self, context: str, entry: HistoryEntry, /) -> None:
        """Replace the results of a context."""

    def save_trial(self, changes: Configuration, /) -> None:
        """Record the changes that are on trial. The mapping is empty if there is no trial."""

    def renew_trial(self) -> None:
        """Record that the trial goes on."""

    def suspected_trials(self) -> Sequence[Configuration]:
        """Return the changes on trial in other runs that may have crashed."""


class NullHistoryStore:
    """Stores nothing."""

    def save(self, context: str, entry: HistoryEntry, /) -> None:
        """Do nothing."""

    def save_trial(self, changes: Configuration, /) -> None:
        """Do nothing."""

    def renew_trial(self) -> None:
        """Do nothing."""

    def suspected_trials(self) -> Sequence[Configuration]:
        """Return nothing."""
        return ()


class SearchHistory:
    """Records the trials of one job. Its properties refer to the present context.

    Args:
        entries: Results of earlier runs, by context.
        crashed_trials: Changes that were on trial when earlier runs crashed. They are not tried in
            this run.
        store: Keeps the results.

    Attributes:
        context: Name of the present context; "" before the first `enter_context`.
    """

    def __init__(
        self,
        entries: Mapping[str, HistoryEntry] | None = None,
        crashed_trials: Sequence[Configuration] = (),
        store: HistoryStore | None = None,
    ) -> None:
        self.context = ""
        self._context_reading: MetricsDelta | None = None
        self._num_shifts = 0
        self._is_on_trial = False
        self._store = store or NullHistoryStore()
        entries = entries or {}
        self._best = {
            context: each.configuration for context, each in entries.items() if each.configuration
        }
        self._rejected = {context: set(each.excluded) for context, each in entries.items()}
        # Changes that could not be measured in this run, for example because memory did not
        # suffice. They are not saved.
        self._failed: dict[str, list[Configuration]] = {}
        self._crashed_trials = crashed_trials
        self._suspected_trials: Sequence[Configuration] = ()
        for changes in crashed_trials:
            logger.warning(
                "an earlier run crashed in a trial of %s: not tried in this run", _listed(changes)
            )

    @property
    def best(self) -> Configuration | None:
        """The best configuration, or the only one in use so far; None if unknown or failed."""
        best = self._known_best
        if best is None or any(is_within(each, best) for each in self._failed_here):
            return None
        return best

    @property
    def excluded(self) -> ExcludedValues:
        """Knobs with values that are not to be tried."""
        failed = (_first_knob(each) for each in self._failed_here)
        return frozenset(self._rejected.get(self.context, ())).union(*failed)

    def enter_context(self, reading: MetricsDelta, configuration: Configuration) -> None:
        """Derive the context from metrics.

        The configuration in use counts as the best one of the context that is left, unless a better
        one is known.
        """
        left, self.context = self.context, context_of(reading, self._context_reading)
        if left and left != self.context:
            self._best.setdefault(left, configuration)
        if self._context_reading is None or context_of(self._context_reading) != self.context:
            self._context_reading = reading

    def check_other_runs(self) -> None:
        """Exclude the trials in which other runs may have crashed, as long as they may have."""
        before, self._suspected_trials = self._suspected_trials, self._store.suspected_trials()
        for changes in self._suspected_trials:
            if changes not in before:
                logger.warning(
                    "another run may have crashed in a trial of %s: not tried until that trial "
                    "continues or ends",
                    _listed(changes),
                )

    def on_trial_start(self, changes: Configuration) -> None:
        """Record a started trial, so that the next run skips it if this process is killed."""
        self._is_on_trial = True
        self._store.save_trial(changes)

    def on_trial_step(self) -> None:
        """Record that the trial goes on, so that jobs on other hosts do not exclude it."""
        if self._is_on_trial:
            self._store.renew_trial()

    def on_trial_resume(self, changes: Configuration) -> None:
        """Record that a trial goes on which `on_trial_end` may have paused."""
        if not self._is_on_trial:
            self.on_trial_start(changes)

    def on_trial_end(self) -> None:
        """Record that nothing is on trial."""
        if self._is_on_trial:
            self._is_on_trial = False
            self._store.save_trial({})

    def accept(self, configuration: Configuration, instead_of: Mapping[str, Value]) -> None:
        """Record that a configuration is better than the same one with other values.

        Args:
            configuration: The accepted configuration.
            instead_of: The values that the accepted configuration replaces, by knob.
        """
        self._num_shifts = 0
        self._best[self.context] = configuration
        self._rejected.setdefault(self.context, set()).update(instead_of.items())
        self._save()
        self.on_trial_end()

    def reject(self, changes: Configuration) -> None:
        """Record that a change did not help, or did harm.

        The value of the first knob is rejected, because all other knobs are its partners. If the
        changes restore the best configuration with several knobs, no single knob is rejected.
        """
        was_best = is_within(changes, self._known_best or {})
        if was_best:
            self._best.pop(self.context, None)
        blamed = _first_knob(changes, of_several=not was_best)
        self._rejected.setdefault(self.context, set()).update(blamed)
        self._save()
        self.on_trial_end()

    def mark_failed(self, changes: Configuration) -> None:
        """Record that a change could not be tried in this run; a later run may try it."""
        self._failed.setdefault(self.context, []).append(changes)

    def on_memory_saving(self, values: Configuration) -> None:
        """Record that values took too much memory.

        The changes of the best configuration are rejected. Values that the user chose may be tried
        again, once.
        """
        if values and is_within(values, self.best or {}):
            self.reject(values)

    def on_speed_shift(self, speed: str) -> None:
        """Allow rejected changes again, because steps became e.g. "slower".

        If speeds alternated, every change would be tried again and again. Only the 1st, 2nd, 4th,
        8th... shift since the last accepted change therefore has an effect.
        """
        self._num_shifts += 1
        if self._num_shifts & (self._num_shifts - 1) == 0:
            rejected = self._rejected.pop(self.context, None)
            failed = self._failed.pop(self.context, None)
            if rejected or failed:
                logger.info("step times have become %s: rejected changes may be tried again", speed)

    @property
    def _known_best(self) -> Configuration | None:
        """The best configuration in this context, or in an adjacent one if this one is unknown.

        An adjacent context is used because the measured bandwidth of a link that is not shared
        differs by a factor of two between runs.
        """
        if self.context in self._best or self.context in self._rejected:
            return self._best.get(self.context)
        adjacent = map(self._best.get, adjacent_contexts(self.context))
        return next((best for best in adjacent if best is not None), None)

    @property
    def _failed_here(self) -> Sequence[Configuration]:
        failed = self._failed.get(self.context, ())
        return [*self._crashed_trials, *self._suspected_trials, *failed]

    def _save(self) -> None:
        entry = HistoryEntry(
            configuration=self._best.get(self.context, {}),
            excluded=frozenset(self._rejected.get(self.context, ())),
        )
        self._store.save(self.context, entry)


def _listed(changes: Configuration) -> str:
    return ", ".join(f"{knob}={value}" for knob, value in changes.items())


def _first_knob(changes: Configuration, *, of_several: bool = True) -> ExcludedValues:
    """Return the first knob with its value.

    If there are several knobs and `of_several` is False, return an empty set.
    """
    is_sure = of_several or len(changes) == 1
    return frozenset(list(changes.items())[:1] if is_sure else ())

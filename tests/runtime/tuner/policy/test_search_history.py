"""Tests of the search history by context."""

from __future__ import annotations

from dataclasses import replace

from zerowatch.runtime.tuner.policy.diagnose import context_of
from zerowatch.runtime.tuner.policy.history_file import HistoryEntry
from zerowatch.runtime.tuner.policy.metrics_delta import MetricsDelta
from zerowatch.runtime.tuner.policy.policy_types import Configuration
from zerowatch.runtime.tuner.policy.search_history import SearchHistory

FAST, SLOW = (MetricsDelta(link_bandwidth=each, world_size=2) for each in (2.5e8, 2.5e7))
NEAR = context_of(FAST)
PLAIN, COMPRESSED = ({"gradient_compression": kind} for kind in (None, "int8"))


def test_without_an_accepted_change_the_configuration_used_in_a_context_is_its_best() -> None:
    history = SearchHistory()
    history.enter_context(FAST, PLAIN)
    history.enter_context(SLOW, PLAIN)
    history.accept(COMPRESSED, instead_of=PLAIN)

    history.enter_context(FAST, COMPRESSED)

    assert history.best == PLAIN
    assert history.excluded == frozenset()


def test_an_accepted_change_is_remembered_when_the_context_changes() -> None:
    history = SearchHistory()
    history.enter_context(SLOW, PLAIN)
    history.accept(COMPRESSED, instead_of=PLAIN)
    history.enter_context(FAST, COMPRESSED)

    history.enter_context(SLOW, PLAIN)

    assert history.best == COMPRESSED


def test_a_rejected_best_configuration_is_dropped() -> None:
    history = SearchHistory()
    history.enter_context(FAST, PLAIN)
    history.enter_context(SLOW, PLAIN)
    history.enter_context(FAST, COMPRESSED)

    history.reject(PLAIN)

    assert history.best is None


def test_of_the_knobs_of_a_best_configuration_none_is_rejected_alone() -> None:
    both = {"micro_batch_samples": 8, "gradient_compression": "int8"}
    history = SearchHistory({NEAR: HistoryEntry(configuration=both, excluded=frozenset())})
    history.enter_context(FAST, PLAIN)

    history.reject(both)

    assert history.best is None
    assert history.excluded == frozenset()


def test_a_change_that_could_not_be_tried_is_not_saved_as_rejected() -> None:
    store = FakeStore()
    history = SearchHistory(
        {NEAR: HistoryEntry(configuration=COMPRESSED, excluded=frozenset())}, store=store
    )
    history.enter_context(FAST, PLAIN)

    history.mark_failed(COMPRESSED)
    history.accept({"micro_batch_samples": 8}, instead_of={"micro_batch_samples": 4})

    assert history.excluded == {("gradient_compression", "int8"), ("micro_batch_samples", 4)}
    assert store.entry.excluded == {("micro_batch_samples", 4)}


def test_the_best_of_an_adjacent_context_is_tried_once() -> None:
    history = SearchHistory({NEAR: HistoryEntry(configuration=COMPRESSED, excluded=frozenset())})

    history.enter_context(replace(FAST, link_bandwidth=5e8), PLAIN)
    assert history.best == COMPRESSED

    history.reject(COMPRESSED)
    history.enter_context(replace(FAST, link_bandwidth=5e8), PLAIN)
    assert history.best is None


def test_the_best_of_an_adjacent_context_is_not_saved() -> None:
    store = FakeStore()
    history = SearchHistory(
        {NEAR: HistoryEntry(configuration=COMPRESSED, excluded=frozenset())}, store=store
    )
    history.enter_context(replace(FAST, link_bandwidth=5e8), PLAIN)

    history.reject({"micro_batch_samples": 8})

    assert not store.entry.configuration


def test_the_context_itself_precedes_an_adjacent_one() -> None:
    faster = replace(FAST, link_bandwidth=5e8)
    history = SearchHistory(
        {
            NEAR: HistoryEntry(configuration=COMPRESSED, excluded=frozenset()),
            context_of(faster): HistoryEntry(configuration=PLAIN, excluded=frozenset()),
        }
    )

    history.enter_context(faster, COMPRESSED)

    assert history.best == PLAIN


def test_a_far_slower_link_is_not_adjacent() -> None:
    history = SearchHistory({NEAR: HistoryEntry(configuration=COMPRESSED, excluded=frozenset())})

    history.enter_context(SLOW, PLAIN)

    assert history.best is None


def test_a_crashed_trial_is_excluded_in_every_context() -> None:
    history = SearchHistory(crashed_trials=[COMPRESSED])

    for reading in (FAST, SLOW):
        history.enter_context(reading, PLAIN)
        assert history.excluded == {("gradient_compression", "int8")}


class FakeStore:
    """Keeps the last saved entry."""

    def save(self, context: str, entry: HistoryEntry) -> None:
        self.entry = entry

    def save_trial(self, changes: Configuration) -> None:
        pass

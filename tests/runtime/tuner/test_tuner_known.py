"""What is known in each of the surroundings that a job goes through."""

from __future__ import annotations

from dataclasses import replace

from zerowatch.runtime.tuner.policy.diagnose import context_of
from zerowatch.runtime.tuner.policy.history_file import HistoryEntry
from zerowatch.runtime.tuner.policy.metrics_delta import MetricsDelta
from zerowatch.runtime.tuner.policy.search_history import SearchHistory
from zerowatch.runtime.tuner.policy.types import Configuration

FAST, SLOW = (MetricsDelta(link_bandwidth=each, world_size=2) for each in (2.5e8, 2.5e7))
NEAR = context_of(FAST)
PLAIN, COMPRESSED = ({"gradient_compression": kind} for kind in (None, "int8"))


def test_where_nothing_was_found_what_was_used_there_is_come_back_to() -> None:
    known = SearchHistory()
    known.look_around(FAST, PLAIN)
    known.look_around(SLOW, PLAIN)
    known.found(COMPRESSED, instead_of=PLAIN)

    known.look_around(FAST, COMPRESSED)

    assert known.best == PLAIN
    assert known.denied == frozenset()


def test_what_was_found_somewhere_is_not_lost_by_leaving() -> None:
    known = SearchHistory()
    known.look_around(SLOW, PLAIN)
    known.found(COMPRESSED, instead_of=PLAIN)
    known.look_around(FAST, COMPRESSED)

    known.look_around(SLOW, PLAIN)

    assert known.best == COMPRESSED


def test_what_failed_there_is_not_come_back_to() -> None:
    known = SearchHistory()
    known.look_around(FAST, PLAIN)
    known.look_around(SLOW, PLAIN)
    known.look_around(FAST, COMPRESSED)

    known.reject(PLAIN)

    assert known.best is None


def test_of_several_knobs_that_were_the_best_together_none_is_blamed_alone() -> None:
    both = {"micro_batch_samples": 8, "gradient_compression": "int8"}
    known = SearchHistory({NEAR: HistoryEntry(configuration=both, denied=frozenset())})
    known.look_around(FAST, PLAIN)

    known.reject(both)

    assert known.best is None
    assert known.denied == frozenset()


def test_what_could_not_be_tried_is_not_remembered_as_harmful() -> None:
    memory = Kept()
    known = SearchHistory(
        {NEAR: HistoryEntry(configuration=COMPRESSED, denied=frozenset())}, memory=memory
    )
    known.look_around(FAST, PLAIN)

    known.mark_failed(COMPRESSED)
    known.found({"micro_batch_samples": 8}, instead_of={"micro_batch_samples": 4})

    assert known.denied == {("gradient_compression", "int8"), ("micro_batch_samples", 4)}
    assert memory.kept.denied == {("micro_batch_samples", 4)}


def test_on_a_link_about_as_fast_what_was_best_is_tried_once() -> None:
    known = SearchHistory({NEAR: HistoryEntry(configuration=COMPRESSED, denied=frozenset())})

    known.look_around(replace(FAST, link_bandwidth=5e8), PLAIN)
    assert known.best == COMPRESSED

    known.reject(COMPRESSED)
    known.look_around(replace(FAST, link_bandwidth=5e8), PLAIN)
    assert known.best is None


def test_what_is_only_borrowed_is_not_remembered_as_found_there() -> None:
    memory = Kept()
    known = SearchHistory(
        {NEAR: HistoryEntry(configuration=COMPRESSED, denied=frozenset())}, memory=memory
    )
    known.look_around(replace(FAST, link_bandwidth=5e8), PLAIN)

    known.reject({"micro_batch_samples": 8})

    assert not memory.kept.configuration


def test_what_is_known_of_a_link_goes_before_what_is_known_of_another_like_it() -> None:
    faster = replace(FAST, link_bandwidth=5e8)
    known = SearchHistory(
        {
            NEAR: HistoryEntry(configuration=COMPRESSED, denied=frozenset()),
            context_of(faster): HistoryEntry(configuration=PLAIN, denied=frozenset()),
        }
    )

    known.look_around(faster, COMPRESSED)

    assert known.best == PLAIN


def test_a_link_far_slower_is_another_matter() -> None:
    known = SearchHistory({NEAR: HistoryEntry(configuration=COMPRESSED, denied=frozenset())})

    known.look_around(SLOW, PLAIN)

    assert known.best is None


def test_what_a_run_died_of_is_tried_on_no_link() -> None:
    known = SearchHistory(died_of=[COMPRESSED])

    for reading in (FAST, SLOW):
        known.look_around(reading, PLAIN)
        assert known.denied == {("gradient_compression", "int8")}


class Kept:
    """The last that was to be remembered."""

    def remember(self, context: str, remembered: HistoryEntry) -> None:
        self.kept = remembered

    def on_trial(self, changes: Configuration) -> None:
        pass

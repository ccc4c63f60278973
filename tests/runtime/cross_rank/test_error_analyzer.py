"""Tests of the likely cause of a collective's error: this rank, or another one."""

from __future__ import annotations

import pytest
from fakes.rank_sets import FakeGroup

from zerowatch.metrics.catalog.communication import COLLECTIVE_MISMATCHES
from zerowatch.metrics.recorder import Recorder
from zerowatch.runtime.cross_rank.error_analyzer import CollectiveErrorAnalyzer, attribute_failure

STEP = (("all_reduce", 4), ("all_reduce", 4000), ("all_gather", 96))


class FakeThread:
    """Counts the reports that it is asked for."""

    def __init__(self) -> None:
        self.num_reports = 0

    def report_now(self) -> None:
        self.num_reports += 1


def trained(steps: int = 5) -> FakeGroup:
    """A group whose members have issued the same calls in each step."""
    group = FakeGroup((0, 1, 2))
    for _ in range(steps):
        for op, size in STEP:
            group.run(op, size)
    return group


@pytest.mark.parametrize("skipped", range(len(STEP)))
def test_a_rank_that_skipped_a_call_detects_it_itself(skipped):
    group = trained()
    calls = [*STEP, *STEP]
    for op, size in calls[:skipped]:
        group.run(op, size)
    op, size = calls[skipped + 1]

    attribution = attribute_failure(1, group.issue(op, size))

    assert attribution is not None
    assert attribution.expected == f"{STEP[skipped][0]} of {STEP[skipped][1]} bytes (float32)"
    assert attribution.message().startswith(
        "rank 1 diverged from the common sequence of collectives at call"
    )


def test_a_rank_that_issued_its_usual_call_has_not_diverged():
    group = trained()

    attribution = attribute_failure(1, group.issue(*STEP[0]))

    assert attribution is not None
    assert attribution.expected is None
    assert "another rank died, or diverged" in attribution.message()


def test_of_two_ranks_the_other_is_named():
    group = FakeGroup((3, 5))
    for _ in range(5):
        group.run()

    attribution = attribute_failure(3, group.issue())

    assert attribution is not None
    assert "rank 5 died, or diverged" in attribution.message()


def test_a_call_that_was_never_issued_before_is_no_divergence():
    group = trained()

    attribution = attribute_failure(
        1, group.issue("barrier", 0)
    )  # the first checkpoint, in which a peer dies

    assert attribution is not None
    assert attribution.expected is None


def test_calls_issued_after_the_one_that_failed_do_not_matter():
    group = trained()
    failed = group.issue(*STEP[0])
    group.issue(*STEP[2])

    attribution = attribute_failure(1, failed)

    assert attribution is not None
    assert (attribution.sequence, attribution.expected) == (failed.sequence, None)


@pytest.mark.parametrize(("size", "mismatches"), [(4, 0), (4000, 1)])
def test_only_a_divergence_counts_as_a_mismatch(size, mismatches):
    group, recorder, thread = trained(), Recorder(), FakeThread()
    analyzer = CollectiveErrorAnalyzer(1, recorder, thread)

    failed = group.issue("all_reduce", size)
    analyzer.analyze(failed)
    analyzer.analyze(failed)  # an error that follows from the first

    assert recorder.snapshot().total(COLLECTIVE_MISMATCHES) == mismatches
    assert thread.num_reports == 1
